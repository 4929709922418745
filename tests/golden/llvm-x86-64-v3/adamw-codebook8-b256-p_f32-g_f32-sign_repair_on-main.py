# from typing import TypeVar
# from tvm.script import tirx as T
# from tvm.tirx.layout import Axis

nb = TypeVar("nb")
@T.prim_func(s_tir=True)
def main(hyper: T.Buffer((T.int64(9),), "float32", align=4), param: T.Buffer((nb, T.int64(256)), "float32", align=4), grad: T.Buffer((nb, T.int64(256)), "float32", align=4), exp_avg_codes: T.Buffer((nb, T.int64(256)), "uint8", align=1), exp_avg_scale: T.Buffer((nb,), "float32", align=4), exp_avg_qmap: T.Buffer((T.int64(256),), "float32", align=4), exp_avg_sq_codes: T.Buffer((nb, T.int64(256)), "uint8", align=1), exp_avg_sq_scale: T.Buffer((nb,), "float32", align=4), exp_avg_sq_qmap: T.Buffer((T.int64(256),), "float32", align=4), nonfinite_count: T.Buffer((nb,), "int32", align=4)):
    T.func_attr({"tirx.noalias": True})
    # with T.sblock("root"):
    exp_avg_sq_old = T.sblock_alloc_buffer((nb, T.int64(256)))
    grad_scaled = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_sq_new = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_old = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_new = T.sblock_alloc_buffer((nb, T.int64(256)))
    finite_zero = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_kept = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_absmax = T.sblock_alloc_buffer((nb,), "int32")
    exp_avg_sq_kept = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_sq_absmax = T.sblock_alloc_buffer((nb,), "int32")
    nonfinite_sum = T.sblock_alloc_buffer((nb,), "int32")
    exp_avg_divisor = T.sblock_alloc_buffer((nb,))
    exp_avg_unit = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_encode_search128 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_encode_search64 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_encode_search32 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_encode_search16 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_encode_search8 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_encode_search4 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_encode_search2 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_encode_search1 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_encode_nearest = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_sq_divisor = T.sblock_alloc_buffer((nb,))
    exp_avg_sq_unit = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_sq_encode_search128 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_sq_encode_search64 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_sq_encode_search32 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_sq_encode_search16 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_sq_encode_search8 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_sq_encode_search4 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_sq_encode_search2 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_sq_encode_search1 = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_sq_encode_nearest = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    param_old = T.sblock_alloc_buffer((nb, T.int64(256)))
    param_new = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_absmax_rf = T.sblock_alloc_buffer((nb, T.int64(64)), "int32")
    exp_avg_sq_absmax_rf = T.sblock_alloc_buffer((nb, T.int64(64)), "int32")
    nonfinite_sum_rf = T.sblock_alloc_buffer((nb, T.int64(64)), "int32")
    for b_m_m in T.parallel(nb):
        for exp_avg_absmax_k_1_init in T.vectorized(T.int64(64)):
            with T.sblock("exp_avg_absmax_rf_init"):
                vexp_avg_absmax_k_1 = T.axis.spatial(T.int64(64), exp_avg_absmax_k_1_init)
                v_b = T.axis.spatial(nb, b_m_m)
                T.reads()
                T.writes(exp_avg_absmax_rf[v_b, vexp_avg_absmax_k_1])
                exp_avg_absmax_rf[v_b, vexp_avg_absmax_k_1] = -2147483648
        for exp_avg_sq_absmax_k_1_init in T.vectorized(T.int64(64)):
            with T.sblock("exp_avg_sq_absmax_rf_init"):
                vexp_avg_sq_absmax_k_1 = T.axis.spatial(T.int64(64), exp_avg_sq_absmax_k_1_init)
                v_b = T.axis.spatial(nb, b_m_m)
                T.reads()
                T.writes(exp_avg_sq_absmax_rf[v_b, vexp_avg_sq_absmax_k_1])
                exp_avg_sq_absmax_rf[v_b, vexp_avg_sq_absmax_k_1] = -2147483648
        for nonfinite_sum_k_1_init in T.vectorized(T.int64(64)):
            with T.sblock("nonfinite_sum_rf_init"):
                vnonfinite_sum_k_1 = T.axis.spatial(T.int64(64), nonfinite_sum_k_1_init)
                v_b = T.axis.spatial(nb, b_m_m)
                T.reads()
                T.writes(nonfinite_sum_rf[v_b, vnonfinite_sum_k_1])
                nonfinite_sum_rf[v_b, vnonfinite_sum_k_1] = 0
        for i_0_m_0 in range(T.int64(2)):
            for i_0_m_1 in T.unroll(T.int64(2)):
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_old"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_qmap[T.Cast("int64", T.Cast("int32", exp_avg_sq_codes[v_b, v_i]))], exp_avg_sq_codes[v_b, v_i], exp_avg_sq_scale[v_b])
                        T.writes(exp_avg_sq_old[v_b, v_i])
                        exp_avg_sq_old[v_b, v_i] = exp_avg_sq_qmap[T.Cast("int64", T.Cast("int32", exp_avg_sq_codes[v_b, v_i]))] * exp_avg_sq_scale[v_b]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("grad_scaled"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(grad[v_b, v_i], hyper[T.int64(0)])
                        T.writes(grad_scaled[v_b, v_i])
                        grad_scaled[v_b, v_i] = grad[v_b, v_i] * hyper[T.int64(0)]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_new"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(hyper[T.int64(3):T.int64(5)], exp_avg_sq_old[v_b, v_i], grad_scaled[v_b, v_i])
                        T.writes(exp_avg_sq_new[v_b, v_i])
                        exp_avg_sq_new[v_b, v_i] = hyper[T.int64(3)] * exp_avg_sq_old[v_b, v_i] + hyper[T.int64(4)] * (grad_scaled[v_b, v_i] * grad_scaled[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_old"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_qmap[T.Cast("int64", T.Cast("int32", exp_avg_codes[v_b, v_i]))], exp_avg_codes[v_b, v_i], exp_avg_scale[v_b])
                        T.writes(exp_avg_old[v_b, v_i])
                        exp_avg_old[v_b, v_i] = exp_avg_qmap[T.Cast("int64", T.Cast("int32", exp_avg_codes[v_b, v_i]))] * exp_avg_scale[v_b]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_new"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(hyper[T.int64(1):T.int64(3)], exp_avg_sq_old[v_b, v_i], exp_avg_old[v_b, v_i], grad_scaled[v_b, v_i])
                        T.writes(exp_avg_new[v_b, v_i])
                        exp_avg_new[v_b, v_i] = hyper[T.int64(1)] * T.Select(T.reinterpret("int32", exp_avg_sq_old[v_b, v_i]) & 2147483647 == 0, T.float32(0.0), exp_avg_old[v_b, v_i]) + hyper[T.int64(2)] * grad_scaled[v_b, v_i]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("finite_zero"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_new[v_b, v_i], hyper[T.int64(0)], exp_avg_new[v_b, v_i], grad_scaled[v_b, v_i])
                        T.writes(finite_zero[v_b, v_i])
                        finite_zero[v_b, v_i] = exp_avg_sq_new[v_b, v_i] * T.reinterpret("float32", T.reinterpret("int32", hyper[T.int64(0)]) & -2147483648) + (exp_avg_new[v_b, v_i] * T.reinterpret("float32", T.reinterpret("int32", hyper[T.int64(0)]) & -2147483648) + (grad_scaled[v_b, v_i] * T.reinterpret("float32", T.reinterpret("int32", hyper[T.int64(0)]) & -2147483648) + T.reinterpret("float32", T.reinterpret("int32", hyper[T.int64(0)]) & -2147483648)))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_kept"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(finite_zero[v_b, v_i], exp_avg_new[v_b, v_i], exp_avg_old[v_b, v_i])
                        T.writes(exp_avg_kept[v_b, v_i])
                        exp_avg_kept[v_b, v_i] = T.Select(finite_zero[v_b, v_i] == T.float32(0.0), exp_avg_new[v_b, v_i], exp_avg_old[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_kept"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(finite_zero[v_b, v_i], exp_avg_sq_new[v_b, v_i], exp_avg_sq_old[v_b, v_i])
                        T.writes(exp_avg_sq_kept[v_b, v_i])
                        exp_avg_sq_kept[v_b, v_i] = T.Select(finite_zero[v_b, v_i] == T.float32(0.0), exp_avg_sq_new[v_b, v_i], exp_avg_sq_old[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("param_old"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(param[v_b, v_i])
                        T.writes(param_old[v_b, v_i])
                        param_old[v_b, v_i] = param[v_b, v_i]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("param_new"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(param_old[v_b, v_i], hyper[T.int64(5):T.int64(8)], exp_avg_new[v_b, v_i], exp_avg_sq_new[v_b, v_i])
                        T.writes(param_new[v_b, v_i])
                        param_new[v_b, v_i] = param_old[v_b, v_i] * hyper[T.int64(7)] - hyper[T.int64(5)] * exp_avg_new[v_b, v_i] / (T.sqrt(T.max(exp_avg_sq_new[v_b, v_i], T.min(hyper[T.int64(6)] * T.float32(1.4901161193847656e-08), T.float32(1.0)) * (hyper[T.int64(6)] * T.float32(1.4901161193847656e-08)))) + hyper[T.int64(6)])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("param_out"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(finite_zero[v_b, v_i], param_new[v_b, v_i], param[v_b, v_i])
                        T.writes(param[v_b, v_i])
                        param[v_b, v_i] = T.Select(finite_zero[v_b, v_i] == T.float32(0.0), param_new[v_b, v_i], param[v_b, v_i])
                for exp_avg_absmax_k_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_absmax_rf_update"):
                        vexp_avg_absmax_k_1 = T.axis.spatial(T.int64(64), exp_avg_absmax_k_1)
                        v_b = T.axis.spatial(nb, b_m_m)
                        vexp_avg_absmax_k_0 = T.axis.reduce(T.int64(4), i_0_m_0 * T.int64(2) + i_0_m_1)
                        T.reads(exp_avg_absmax_rf[v_b, vexp_avg_absmax_k_1], exp_avg_kept[v_b, vexp_avg_absmax_k_0 * T.int64(64) + vexp_avg_absmax_k_1])
                        T.writes(exp_avg_absmax_rf[v_b, vexp_avg_absmax_k_1])
                        exp_avg_absmax_rf[v_b, vexp_avg_absmax_k_1] = T.max(exp_avg_absmax_rf[v_b, vexp_avg_absmax_k_1], T.reinterpret("int32", exp_avg_kept[v_b, vexp_avg_absmax_k_0 * T.int64(64) + vexp_avg_absmax_k_1]) & 2147483647)
                for exp_avg_sq_absmax_k_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_absmax_rf_update"):
                        vexp_avg_sq_absmax_k_1 = T.axis.spatial(T.int64(64), exp_avg_sq_absmax_k_1)
                        v_b = T.axis.spatial(nb, b_m_m)
                        vexp_avg_sq_absmax_k_0 = T.axis.reduce(T.int64(4), i_0_m_0 * T.int64(2) + i_0_m_1)
                        T.reads(exp_avg_sq_absmax_rf[v_b, vexp_avg_sq_absmax_k_1], exp_avg_sq_kept[v_b, vexp_avg_sq_absmax_k_0 * T.int64(64) + vexp_avg_sq_absmax_k_1])
                        T.writes(exp_avg_sq_absmax_rf[v_b, vexp_avg_sq_absmax_k_1])
                        exp_avg_sq_absmax_rf[v_b, vexp_avg_sq_absmax_k_1] = T.max(exp_avg_sq_absmax_rf[v_b, vexp_avg_sq_absmax_k_1], T.reinterpret("int32", exp_avg_sq_kept[v_b, vexp_avg_sq_absmax_k_0 * T.int64(64) + vexp_avg_sq_absmax_k_1]) & 2147483647)
                for nonfinite_sum_k_1 in T.vectorized(T.int64(64)):
                    with T.sblock("nonfinite_sum_rf_update"):
                        vnonfinite_sum_k_1 = T.axis.spatial(T.int64(64), nonfinite_sum_k_1)
                        v_b = T.axis.spatial(nb, b_m_m)
                        vnonfinite_sum_k_0 = T.axis.reduce(T.int64(4), i_0_m_0 * T.int64(2) + i_0_m_1)
                        T.reads(nonfinite_sum_rf[v_b, vnonfinite_sum_k_1], finite_zero[v_b, vnonfinite_sum_k_0 * T.int64(64) + vnonfinite_sum_k_1])
                        T.writes(nonfinite_sum_rf[v_b, vnonfinite_sum_k_1])
                        nonfinite_sum_rf[v_b, vnonfinite_sum_k_1] = nonfinite_sum_rf[v_b, vnonfinite_sum_k_1] + T.Select(finite_zero[v_b, vnonfinite_sum_k_0 * T.int64(64) + vnonfinite_sum_k_1] == T.float32(0.0), 0, 1)
        for ax0 in range(T.int64(64)):
            with T.sblock("exp_avg_absmax"):
                vexp_avg_absmax_k_1 = T.axis.reduce(T.int64(64), ax0)
                v_b = T.axis.spatial(nb, b_m_m)
                T.reads(exp_avg_absmax_rf[v_b, vexp_avg_absmax_k_1])
                T.writes(exp_avg_absmax[v_b])
                with T.init():
                    exp_avg_absmax[v_b] = -2147483648
                exp_avg_absmax[v_b] = T.max(exp_avg_absmax[v_b], exp_avg_absmax_rf[v_b, vexp_avg_absmax_k_1])
        with T.sblock("exp_avg_scale_out"):
            v_b = T.axis.spatial(nb, b_m_m)
            T.reads(exp_avg_absmax[v_b])
            T.writes(exp_avg_scale[v_b])
            exp_avg_scale[v_b] = T.reinterpret("float32", exp_avg_absmax[v_b])
        for ax0 in range(T.int64(64)):
            with T.sblock("exp_avg_sq_absmax"):
                vexp_avg_sq_absmax_k_1 = T.axis.reduce(T.int64(64), ax0)
                v_b = T.axis.spatial(nb, b_m_m)
                T.reads(exp_avg_sq_absmax_rf[v_b, vexp_avg_sq_absmax_k_1])
                T.writes(exp_avg_sq_absmax[v_b])
                with T.init():
                    exp_avg_sq_absmax[v_b] = -2147483648
                exp_avg_sq_absmax[v_b] = T.max(exp_avg_sq_absmax[v_b], exp_avg_sq_absmax_rf[v_b, vexp_avg_sq_absmax_k_1])
        with T.sblock("exp_avg_sq_scale_out"):
            v_b = T.axis.spatial(nb, b_m_m)
            T.reads(exp_avg_sq_absmax[v_b])
            T.writes(exp_avg_sq_scale[v_b])
            exp_avg_sq_scale[v_b] = T.reinterpret("float32", exp_avg_sq_absmax[v_b])
        for ax0 in range(T.int64(64)):
            with T.sblock("nonfinite_sum"):
                vnonfinite_sum_k_1 = T.axis.reduce(T.int64(64), ax0)
                v_b = T.axis.spatial(nb, b_m_m)
                T.reads(nonfinite_sum_rf[v_b, vnonfinite_sum_k_1])
                T.writes(nonfinite_sum[v_b])
                with T.init():
                    nonfinite_sum[v_b] = 0
                nonfinite_sum[v_b] = nonfinite_sum[v_b] + nonfinite_sum_rf[v_b, vnonfinite_sum_k_1]
        with T.sblock("nonfinite_count_out"):
            v_b = T.axis.spatial(nb, b_m_m)
            T.reads(nonfinite_count[v_b], nonfinite_sum[v_b])
            T.writes(nonfinite_count[v_b])
            nonfinite_count[v_b] = nonfinite_count[v_b] + nonfinite_sum[v_b]
        with T.sblock("exp_avg_divisor"):
            v_b = T.axis.spatial(nb, b_m_m)
            T.reads(exp_avg_absmax[v_b])
            T.writes(exp_avg_divisor[v_b])
            exp_avg_divisor[v_b] = T.Select(T.reinterpret("float32", exp_avg_absmax[v_b]) == T.float32(0.0), T.float32(1.0), T.reinterpret("float32", exp_avg_absmax[v_b]))
        with T.sblock("exp_avg_sq_divisor"):
            v_b = T.axis.spatial(nb, b_m_m)
            T.reads(exp_avg_sq_absmax[v_b])
            T.writes(exp_avg_sq_divisor[v_b])
            exp_avg_sq_divisor[v_b] = T.Select(T.reinterpret("float32", exp_avg_sq_absmax[v_b]) == T.float32(0.0), T.float32(1.0), T.reinterpret("float32", exp_avg_sq_absmax[v_b]))
        for i_0_m_0 in range(T.int64(2)):
            for i_0_m_1 in T.unroll(T.int64(2)):
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_unit"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_kept[v_b, v_i], exp_avg_divisor[v_b])
                        T.writes(exp_avg_unit[v_b, v_i])
                        exp_avg_unit[v_b, v_i] = exp_avg_kept[v_b, v_i] / exp_avg_divisor[v_b]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_search128"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_qmap[T.int64(128)], exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_search128[v_b, v_i])
                        exp_avg_encode_search128[v_b, v_i] = T.Select(exp_avg_qmap[T.int64(128)] < exp_avg_unit[v_b, v_i], 128, 0)
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_search64"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search128[v_b, v_i]) + T.int64(64)], exp_avg_encode_search128[v_b, v_i], exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_search64[v_b, v_i])
                        exp_avg_encode_search64[v_b, v_i] = T.Select(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search128[v_b, v_i]) + T.int64(64)] < exp_avg_unit[v_b, v_i], exp_avg_encode_search128[v_b, v_i] + 64, exp_avg_encode_search128[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_search32"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search64[v_b, v_i]) + T.int64(32)], exp_avg_encode_search64[v_b, v_i], exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_search32[v_b, v_i])
                        exp_avg_encode_search32[v_b, v_i] = T.Select(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search64[v_b, v_i]) + T.int64(32)] < exp_avg_unit[v_b, v_i], exp_avg_encode_search64[v_b, v_i] + 32, exp_avg_encode_search64[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_search16"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search32[v_b, v_i]) + T.int64(16)], exp_avg_encode_search32[v_b, v_i], exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_search16[v_b, v_i])
                        exp_avg_encode_search16[v_b, v_i] = T.Select(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search32[v_b, v_i]) + T.int64(16)] < exp_avg_unit[v_b, v_i], exp_avg_encode_search32[v_b, v_i] + 16, exp_avg_encode_search32[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_search8"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search16[v_b, v_i]) + T.int64(8)], exp_avg_encode_search16[v_b, v_i], exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_search8[v_b, v_i])
                        exp_avg_encode_search8[v_b, v_i] = T.Select(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search16[v_b, v_i]) + T.int64(8)] < exp_avg_unit[v_b, v_i], exp_avg_encode_search16[v_b, v_i] + 8, exp_avg_encode_search16[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_search4"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search8[v_b, v_i]) + T.int64(4)], exp_avg_encode_search8[v_b, v_i], exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_search4[v_b, v_i])
                        exp_avg_encode_search4[v_b, v_i] = T.Select(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search8[v_b, v_i]) + T.int64(4)] < exp_avg_unit[v_b, v_i], exp_avg_encode_search8[v_b, v_i] + 4, exp_avg_encode_search8[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_search2"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search4[v_b, v_i]) + T.int64(2)], exp_avg_encode_search4[v_b, v_i], exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_search2[v_b, v_i])
                        exp_avg_encode_search2[v_b, v_i] = T.Select(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search4[v_b, v_i]) + T.int64(2)] < exp_avg_unit[v_b, v_i], exp_avg_encode_search4[v_b, v_i] + 2, exp_avg_encode_search4[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_search1"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search2[v_b, v_i]) + T.int64(1)], exp_avg_encode_search2[v_b, v_i], exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_search1[v_b, v_i])
                        exp_avg_encode_search1[v_b, v_i] = T.Select(exp_avg_qmap[T.Cast("int64", exp_avg_encode_search2[v_b, v_i]) + T.int64(1)] < exp_avg_unit[v_b, v_i], exp_avg_encode_search2[v_b, v_i] + 1, exp_avg_encode_search2[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_nearest"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_unit[v_b, v_i], exp_avg_qmap[T.min(T.Cast("int64", exp_avg_encode_search1[v_b, v_i]), T.Cast("int64", T.min(exp_avg_encode_search1[v_b, v_i] + 1, 255))):T.min(T.Cast("int64", exp_avg_encode_search1[v_b, v_i]), T.Cast("int64", T.min(exp_avg_encode_search1[v_b, v_i] + 1, 255))) + (T.max(T.Cast("int64", exp_avg_encode_search1[v_b, v_i]), T.Cast("int64", T.min(exp_avg_encode_search1[v_b, v_i] + 1, 255))) + T.int64(1) - T.min(T.Cast("int64", exp_avg_encode_search1[v_b, v_i]), T.Cast("int64", T.min(exp_avg_encode_search1[v_b, v_i] + 1, 255))))], exp_avg_encode_search1[v_b, v_i])
                        T.writes(exp_avg_encode_nearest[v_b, v_i])
                        exp_avg_encode_nearest[v_b, v_i] = T.Select(T.fabs(exp_avg_unit[v_b, v_i] - exp_avg_qmap[T.Cast("int64", exp_avg_encode_search1[v_b, v_i])]) <= T.fabs(exp_avg_unit[v_b, v_i] - exp_avg_qmap[T.Cast("int64", T.min(exp_avg_encode_search1[v_b, v_i] + 1, 255))]), exp_avg_encode_search1[v_b, v_i], T.min(exp_avg_encode_search1[v_b, v_i] + 1, 255))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_codes_out"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_unit[v_b, v_i], exp_avg_qmap[T.min(T.Cast("int64", exp_avg_encode_nearest[v_b, v_i]), T.int64(0)):T.min(T.Cast("int64", exp_avg_encode_nearest[v_b, v_i]), T.int64(0)) + (T.max(T.Cast("int64", exp_avg_encode_nearest[v_b, v_i]), T.int64(0)) + T.int64(1) - T.min(T.Cast("int64", exp_avg_encode_nearest[v_b, v_i]), T.int64(0)))], exp_avg_encode_nearest[v_b, v_i])
                        T.writes(exp_avg_codes[v_b, v_i])
                        exp_avg_codes[v_b, v_i] = T.Cast("uint8", T.min(T.max(T.Select(T.float32(0.0) < exp_avg_unit[v_b, v_i] and exp_avg_qmap[T.Cast("int64", exp_avg_encode_nearest[v_b, v_i])] < T.float32(0.0), exp_avg_encode_nearest[v_b, v_i] + 1, T.Select(exp_avg_unit[v_b, v_i] < T.float32(0.0) and T.float32(0.0) < exp_avg_qmap[T.Cast("int64", exp_avg_encode_nearest[v_b, v_i])] and exp_avg_qmap[T.int64(0)] < T.float32(0.0), exp_avg_encode_nearest[v_b, v_i] - 1, exp_avg_encode_nearest[v_b, v_i])), 0), 255))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_unit"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_kept[v_b, v_i], exp_avg_sq_divisor[v_b])
                        T.writes(exp_avg_sq_unit[v_b, v_i])
                        exp_avg_sq_unit[v_b, v_i] = exp_avg_sq_kept[v_b, v_i] / exp_avg_sq_divisor[v_b]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_search128"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_qmap[T.int64(128)], exp_avg_sq_unit[v_b, v_i])
                        T.writes(exp_avg_sq_encode_search128[v_b, v_i])
                        exp_avg_sq_encode_search128[v_b, v_i] = T.Select(exp_avg_sq_qmap[T.int64(128)] < exp_avg_sq_unit[v_b, v_i], 128, 0)
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_search64"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search128[v_b, v_i]) + T.int64(64)], exp_avg_sq_encode_search128[v_b, v_i], exp_avg_sq_unit[v_b, v_i])
                        T.writes(exp_avg_sq_encode_search64[v_b, v_i])
                        exp_avg_sq_encode_search64[v_b, v_i] = T.Select(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search128[v_b, v_i]) + T.int64(64)] < exp_avg_sq_unit[v_b, v_i], exp_avg_sq_encode_search128[v_b, v_i] + 64, exp_avg_sq_encode_search128[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_search32"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search64[v_b, v_i]) + T.int64(32)], exp_avg_sq_encode_search64[v_b, v_i], exp_avg_sq_unit[v_b, v_i])
                        T.writes(exp_avg_sq_encode_search32[v_b, v_i])
                        exp_avg_sq_encode_search32[v_b, v_i] = T.Select(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search64[v_b, v_i]) + T.int64(32)] < exp_avg_sq_unit[v_b, v_i], exp_avg_sq_encode_search64[v_b, v_i] + 32, exp_avg_sq_encode_search64[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_search16"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search32[v_b, v_i]) + T.int64(16)], exp_avg_sq_encode_search32[v_b, v_i], exp_avg_sq_unit[v_b, v_i])
                        T.writes(exp_avg_sq_encode_search16[v_b, v_i])
                        exp_avg_sq_encode_search16[v_b, v_i] = T.Select(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search32[v_b, v_i]) + T.int64(16)] < exp_avg_sq_unit[v_b, v_i], exp_avg_sq_encode_search32[v_b, v_i] + 16, exp_avg_sq_encode_search32[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_search8"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search16[v_b, v_i]) + T.int64(8)], exp_avg_sq_encode_search16[v_b, v_i], exp_avg_sq_unit[v_b, v_i])
                        T.writes(exp_avg_sq_encode_search8[v_b, v_i])
                        exp_avg_sq_encode_search8[v_b, v_i] = T.Select(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search16[v_b, v_i]) + T.int64(8)] < exp_avg_sq_unit[v_b, v_i], exp_avg_sq_encode_search16[v_b, v_i] + 8, exp_avg_sq_encode_search16[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_search4"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search8[v_b, v_i]) + T.int64(4)], exp_avg_sq_encode_search8[v_b, v_i], exp_avg_sq_unit[v_b, v_i])
                        T.writes(exp_avg_sq_encode_search4[v_b, v_i])
                        exp_avg_sq_encode_search4[v_b, v_i] = T.Select(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search8[v_b, v_i]) + T.int64(4)] < exp_avg_sq_unit[v_b, v_i], exp_avg_sq_encode_search8[v_b, v_i] + 4, exp_avg_sq_encode_search8[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_search2"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search4[v_b, v_i]) + T.int64(2)], exp_avg_sq_encode_search4[v_b, v_i], exp_avg_sq_unit[v_b, v_i])
                        T.writes(exp_avg_sq_encode_search2[v_b, v_i])
                        exp_avg_sq_encode_search2[v_b, v_i] = T.Select(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search4[v_b, v_i]) + T.int64(2)] < exp_avg_sq_unit[v_b, v_i], exp_avg_sq_encode_search4[v_b, v_i] + 2, exp_avg_sq_encode_search4[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_search1"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search2[v_b, v_i]) + T.int64(1)], exp_avg_sq_encode_search2[v_b, v_i], exp_avg_sq_unit[v_b, v_i])
                        T.writes(exp_avg_sq_encode_search1[v_b, v_i])
                        exp_avg_sq_encode_search1[v_b, v_i] = T.Select(exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search2[v_b, v_i]) + T.int64(1)] < exp_avg_sq_unit[v_b, v_i], exp_avg_sq_encode_search2[v_b, v_i] + 1, exp_avg_sq_encode_search2[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_nearest"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_unit[v_b, v_i], exp_avg_sq_qmap[T.min(T.Cast("int64", exp_avg_sq_encode_search1[v_b, v_i]), T.Cast("int64", T.min(exp_avg_sq_encode_search1[v_b, v_i] + 1, 255))):T.min(T.Cast("int64", exp_avg_sq_encode_search1[v_b, v_i]), T.Cast("int64", T.min(exp_avg_sq_encode_search1[v_b, v_i] + 1, 255))) + (T.max(T.Cast("int64", exp_avg_sq_encode_search1[v_b, v_i]), T.Cast("int64", T.min(exp_avg_sq_encode_search1[v_b, v_i] + 1, 255))) + T.int64(1) - T.min(T.Cast("int64", exp_avg_sq_encode_search1[v_b, v_i]), T.Cast("int64", T.min(exp_avg_sq_encode_search1[v_b, v_i] + 1, 255))))], exp_avg_sq_encode_search1[v_b, v_i])
                        T.writes(exp_avg_sq_encode_nearest[v_b, v_i])
                        exp_avg_sq_encode_nearest[v_b, v_i] = T.Select(T.fabs(exp_avg_sq_unit[v_b, v_i] - exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_search1[v_b, v_i])]) <= T.fabs(exp_avg_sq_unit[v_b, v_i] - exp_avg_sq_qmap[T.Cast("int64", T.min(exp_avg_sq_encode_search1[v_b, v_i] + 1, 255))]), exp_avg_sq_encode_search1[v_b, v_i], T.min(exp_avg_sq_encode_search1[v_b, v_i] + 1, 255))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_codes_out"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_unit[v_b, v_i], exp_avg_sq_qmap[T.min(T.Cast("int64", exp_avg_sq_encode_nearest[v_b, v_i]), T.int64(0)):T.min(T.Cast("int64", exp_avg_sq_encode_nearest[v_b, v_i]), T.int64(0)) + (T.max(T.Cast("int64", exp_avg_sq_encode_nearest[v_b, v_i]), T.int64(0)) + T.int64(1) - T.min(T.Cast("int64", exp_avg_sq_encode_nearest[v_b, v_i]), T.int64(0)))], exp_avg_sq_encode_nearest[v_b, v_i])
                        T.writes(exp_avg_sq_codes[v_b, v_i])
                        exp_avg_sq_codes[v_b, v_i] = T.Cast("uint8", T.min(T.max(T.Select(T.float32(0.0) < exp_avg_sq_unit[v_b, v_i] and exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_nearest[v_b, v_i])] < T.float32(0.0), exp_avg_sq_encode_nearest[v_b, v_i] + 1, T.Select(exp_avg_sq_unit[v_b, v_i] < T.float32(0.0) and T.float32(0.0) < exp_avg_sq_qmap[T.Cast("int64", exp_avg_sq_encode_nearest[v_b, v_i])] and exp_avg_sq_qmap[T.int64(0)] < T.float32(0.0), exp_avg_sq_encode_nearest[v_b, v_i] - 1, exp_avg_sq_encode_nearest[v_b, v_i])), 0), 255))
