# from typing import TypeVar
# from tvm.script import tirx as T
# from tvm.tirx.layout import Axis

nb = TypeVar("nb")
@T.prim_func(s_tir=True)
def main(hyper: T.Buffer((T.int64(9),), "float32", align=4), param: T.Buffer((nb, T.int64(128)), "float32", align=4), grad: T.Buffer((nb, T.int64(128)), "float32", align=4), exp_avg_codes: T.Buffer((nb, T.int64(64)), "uint8", align=1), exp_avg_scale: T.Buffer((nb,), "float32", align=4), exp_avg_sq_codes: T.Buffer((nb, T.int64(64)), "uint8", align=1), exp_avg_sq_scale: T.Buffer((nb,), "float32", align=4), nonfinite_count: T.Buffer((nb,), "int32", align=4)):
    T.func_attr({"tirx.noalias": True})
    # with T.sblock("root"):
    exp_avg_sq_old = T.sblock_alloc_buffer((nb, T.int64(128)))
    grad_scaled = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_sq_new = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_old = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_new = T.sblock_alloc_buffer((nb, T.int64(128)))
    finite_zero = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_kept = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_absmax = T.sblock_alloc_buffer((nb,), "int32")
    exp_avg_sq_kept = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_sq_absmax = T.sblock_alloc_buffer((nb,), "int32")
    nonfinite_sum = T.sblock_alloc_buffer((nb,), "int32")
    exp_avg_shift = T.sblock_alloc_buffer((nb,))
    exp_avg_inverse = T.sblock_alloc_buffer((nb,))
    exp_avg_unit = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_encode_8 = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_encode_4 = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_encode_2 = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_encode_1 = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_encode_code = T.sblock_alloc_buffer((nb, T.int64(128)), "uint8")
    exp_avg_sq_shift = T.sblock_alloc_buffer((nb,))
    exp_avg_sq_inverse = T.sblock_alloc_buffer((nb,))
    exp_avg_sq_unit = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_sq_encode_scaled = T.sblock_alloc_buffer((nb, T.int64(128)))
    exp_avg_sq_encode_floor = T.sblock_alloc_buffer((nb, T.int64(128)), "int32")
    exp_avg_sq_encode_code = T.sblock_alloc_buffer((nb, T.int64(128)), "uint8")
    param_old = T.sblock_alloc_buffer((nb, T.int64(128)))
    param_new = T.sblock_alloc_buffer((nb, T.int64(128)))
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
        for i_0_m_0 in range(T.int64(1)):
            for i_0_m_1 in T.unroll(T.int64(2)):
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_old"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_codes[v_b, v_i // T.int64(2)], exp_avg_sq_scale[v_b])
                        T.writes(exp_avg_sq_old[v_b, v_i])
                        exp_avg_sq_old[v_b, v_i] = T.Cast("float32", (T.Cast("int32", T.qopt_bytes_of_pairs(exp_avg_sq_codes[v_b, v_i // T.int64(2)])) >> T.Cast("int32", T.int64(4) - v_i % T.int64(2) * T.int64(4)) & 15) + 1) * T.float32(0.0625) * exp_avg_sq_scale[v_b]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("grad_scaled"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(grad[v_b, v_i], hyper[T.int64(0)])
                        T.writes(grad_scaled[v_b, v_i])
                        grad_scaled[v_b, v_i] = grad[v_b, v_i] * hyper[T.int64(0)]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_new"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(hyper[T.int64(3):T.int64(5)], exp_avg_sq_old[v_b, v_i], grad_scaled[v_b, v_i])
                        T.writes(exp_avg_sq_new[v_b, v_i])
                        exp_avg_sq_new[v_b, v_i] = hyper[T.int64(3)] * exp_avg_sq_old[v_b, v_i] + hyper[T.int64(4)] * (grad_scaled[v_b, v_i] * grad_scaled[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_old"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_codes[v_b, v_i // T.int64(2)], exp_avg_scale[v_b])
                        T.writes(exp_avg_old[v_b, v_i])
                        exp_avg_old[v_b, v_i] = T.qopt_permute16(T.Cast("int32", T.qopt_bytes_of_pairs(exp_avg_codes[v_b, v_i // T.int64(2)])) >> T.Cast("int32", T.int64(4) - v_i % T.int64(2) * T.int64(4)) & 15, T.float32(-0.88749998807907104), T.float32(-0.66250002384185791), T.float32(-0.4375), T.float32(-0.21249999105930328), T.float32(-0.077500000596046448), T.float32(-0.032500002533197403), T.float32(-0.0054999999701976776), T.float32(0.0), T.float32(0.0054999999701976776), T.float32(0.032500002533197403), T.float32(0.077500000596046448), T.float32(0.21249999105930328), T.float32(0.4375), T.float32(0.66250002384185791), T.float32(0.88749998807907104), T.float32(1.0)) * exp_avg_scale[v_b]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_new"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(hyper[T.int64(1):T.int64(3)], exp_avg_sq_old[v_b, v_i], exp_avg_old[v_b, v_i], grad_scaled[v_b, v_i])
                        T.writes(exp_avg_new[v_b, v_i])
                        exp_avg_new[v_b, v_i] = hyper[T.int64(1)] * T.Select(T.reinterpret("int32", exp_avg_sq_old[v_b, v_i]) & 2147483647 == 0, T.float32(0.0), exp_avg_old[v_b, v_i]) + hyper[T.int64(2)] * grad_scaled[v_b, v_i]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("finite_zero"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_new[v_b, v_i], hyper[T.int64(0)], exp_avg_new[v_b, v_i], grad_scaled[v_b, v_i])
                        T.writes(finite_zero[v_b, v_i])
                        finite_zero[v_b, v_i] = exp_avg_sq_new[v_b, v_i] * T.reinterpret("float32", T.reinterpret("int32", hyper[T.int64(0)]) & -2147483648) + (exp_avg_new[v_b, v_i] * T.reinterpret("float32", T.reinterpret("int32", hyper[T.int64(0)]) & -2147483648) + (grad_scaled[v_b, v_i] * T.reinterpret("float32", T.reinterpret("int32", hyper[T.int64(0)]) & -2147483648) + T.reinterpret("float32", T.reinterpret("int32", hyper[T.int64(0)]) & -2147483648)))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_kept"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(finite_zero[v_b, v_i], exp_avg_new[v_b, v_i], exp_avg_old[v_b, v_i])
                        T.writes(exp_avg_kept[v_b, v_i])
                        exp_avg_kept[v_b, v_i] = T.Select(finite_zero[v_b, v_i] == T.float32(0.0), exp_avg_new[v_b, v_i], exp_avg_old[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_kept"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(finite_zero[v_b, v_i], exp_avg_sq_new[v_b, v_i], exp_avg_sq_old[v_b, v_i])
                        T.writes(exp_avg_sq_kept[v_b, v_i])
                        exp_avg_sq_kept[v_b, v_i] = T.Select(finite_zero[v_b, v_i] == T.float32(0.0), exp_avg_sq_new[v_b, v_i], exp_avg_sq_old[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("param_old"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(param[v_b, v_i])
                        T.writes(param_old[v_b, v_i])
                        param_old[v_b, v_i] = param[v_b, v_i]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("param_new"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(param_old[v_b, v_i], hyper[T.int64(5):T.int64(8)], exp_avg_new[v_b, v_i], exp_avg_sq_new[v_b, v_i])
                        T.writes(param_new[v_b, v_i])
                        param_new[v_b, v_i] = param_old[v_b, v_i] * hyper[T.int64(7)] - hyper[T.int64(5)] * exp_avg_new[v_b, v_i] / (T.sqrt(T.max(exp_avg_sq_new[v_b, v_i], T.min(hyper[T.int64(6)] * T.float32(1.4901161193847656e-08), T.float32(1.0)) * (hyper[T.int64(6)] * T.float32(1.4901161193847656e-08)))) + hyper[T.int64(6)])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("param_out"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(finite_zero[v_b, v_i], param_new[v_b, v_i], param[v_b, v_i])
                        T.writes(param[v_b, v_i])
                        param[v_b, v_i] = T.Select(finite_zero[v_b, v_i] == T.float32(0.0), param_new[v_b, v_i], param[v_b, v_i])
                for exp_avg_absmax_k_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_absmax_rf_update"):
                        vexp_avg_absmax_k_1 = T.axis.spatial(T.int64(64), exp_avg_absmax_k_1)
                        v_b = T.axis.spatial(nb, b_m_m)
                        vexp_avg_absmax_k_0 = T.axis.reduce(T.int64(2), i_0_m_0 * T.int64(2) + i_0_m_1)
                        T.reads(exp_avg_absmax_rf[v_b, vexp_avg_absmax_k_1], exp_avg_kept[v_b, vexp_avg_absmax_k_0 * T.int64(64) + vexp_avg_absmax_k_1])
                        T.writes(exp_avg_absmax_rf[v_b, vexp_avg_absmax_k_1])
                        exp_avg_absmax_rf[v_b, vexp_avg_absmax_k_1] = T.max(exp_avg_absmax_rf[v_b, vexp_avg_absmax_k_1], T.reinterpret("int32", exp_avg_kept[v_b, vexp_avg_absmax_k_0 * T.int64(64) + vexp_avg_absmax_k_1]) & 2147483647)
                for exp_avg_sq_absmax_k_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_absmax_rf_update"):
                        vexp_avg_sq_absmax_k_1 = T.axis.spatial(T.int64(64), exp_avg_sq_absmax_k_1)
                        v_b = T.axis.spatial(nb, b_m_m)
                        vexp_avg_sq_absmax_k_0 = T.axis.reduce(T.int64(2), i_0_m_0 * T.int64(2) + i_0_m_1)
                        T.reads(exp_avg_sq_absmax_rf[v_b, vexp_avg_sq_absmax_k_1], exp_avg_sq_kept[v_b, vexp_avg_sq_absmax_k_0 * T.int64(64) + vexp_avg_sq_absmax_k_1])
                        T.writes(exp_avg_sq_absmax_rf[v_b, vexp_avg_sq_absmax_k_1])
                        exp_avg_sq_absmax_rf[v_b, vexp_avg_sq_absmax_k_1] = T.max(exp_avg_sq_absmax_rf[v_b, vexp_avg_sq_absmax_k_1], T.reinterpret("int32", exp_avg_sq_kept[v_b, vexp_avg_sq_absmax_k_0 * T.int64(64) + vexp_avg_sq_absmax_k_1]) & 2147483647)
                for nonfinite_sum_k_1 in T.vectorized(T.int64(64)):
                    with T.sblock("nonfinite_sum_rf_update"):
                        vnonfinite_sum_k_1 = T.axis.spatial(T.int64(64), nonfinite_sum_k_1)
                        v_b = T.axis.spatial(nb, b_m_m)
                        vnonfinite_sum_k_0 = T.axis.reduce(T.int64(2), i_0_m_0 * T.int64(2) + i_0_m_1)
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
        with T.sblock("exp_avg_shift"):
            v_b = T.axis.spatial(nb, b_m_m)
            T.reads(exp_avg_absmax[v_b])
            T.writes(exp_avg_shift[v_b])
            exp_avg_shift[v_b] = T.Select(T.float32(1152921504606846976.0) < T.reinterpret("float32", exp_avg_absmax[v_b]), T.float32(8.2718061255302767e-25), T.Select(T.reinterpret("float32", exp_avg_absmax[v_b]) < T.float32(8.6736173798840355e-19), T.float32(1208925819614629174706176.0), T.float32(1.0)))
        with T.sblock("exp_avg_inverse"):
            v_b = T.axis.spatial(nb, b_m_m)
            T.reads(exp_avg_absmax[v_b], exp_avg_shift[v_b])
            T.writes(exp_avg_inverse[v_b])
            exp_avg_inverse[v_b] = T.Select(T.reinterpret("float32", exp_avg_absmax[v_b]) == T.float32(0.0), T.float32(0.0), T.float32(1.0) / (T.reinterpret("float32", exp_avg_absmax[v_b]) * exp_avg_shift[v_b]))
        with T.sblock("exp_avg_sq_shift"):
            v_b = T.axis.spatial(nb, b_m_m)
            T.reads(exp_avg_sq_absmax[v_b])
            T.writes(exp_avg_sq_shift[v_b])
            exp_avg_sq_shift[v_b] = T.Select(T.float32(1152921504606846976.0) < T.reinterpret("float32", exp_avg_sq_absmax[v_b]), T.float32(8.2718061255302767e-25), T.Select(T.reinterpret("float32", exp_avg_sq_absmax[v_b]) < T.float32(8.6736173798840355e-19), T.float32(1208925819614629174706176.0), T.float32(1.0)))
        with T.sblock("exp_avg_sq_inverse"):
            v_b = T.axis.spatial(nb, b_m_m)
            T.reads(exp_avg_sq_absmax[v_b], exp_avg_sq_shift[v_b])
            T.writes(exp_avg_sq_inverse[v_b])
            exp_avg_sq_inverse[v_b] = T.Select(T.reinterpret("float32", exp_avg_sq_absmax[v_b]) == T.float32(0.0), T.float32(0.0), T.float32(1.0) / (T.reinterpret("float32", exp_avg_sq_absmax[v_b]) * exp_avg_sq_shift[v_b]))
        for i_0_m_0 in range(T.int64(1)):
            for i_0_m_1 in T.unroll(T.int64(2)):
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_unit"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_kept[v_b, v_i], exp_avg_shift[v_b], exp_avg_inverse[v_b])
                        T.writes(exp_avg_unit[v_b, v_i])
                        exp_avg_unit[v_b, v_i] = exp_avg_kept[v_b, v_i] * exp_avg_shift[v_b] * exp_avg_inverse[v_b]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_8"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_8[v_b, v_i])
                        exp_avg_encode_8[v_b, v_i] = T.Select(T.float32(0.0027499999850988388) < exp_avg_unit[v_b, v_i], T.float32(8388616.0), T.float32(8388608.0))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_4"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_encode_8[v_b, v_i], exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_4[v_b, v_i])
                        exp_avg_encode_4[v_b, v_i] = T.Select(T.qopt_permute16(T.reinterpret("int32", exp_avg_encode_8[v_b, v_i]), T.float32(-0.14499999582767487), T.float32(-0.054999999701976776), T.float32(-0.01900000125169754), T.float32(-0.0027499999850988388), T.float32(0.0027499999850988388), T.float32(0.01900000125169754), T.float32(0.054999999701976776), T.float32(0.14499999582767487), T.float32(0.32499998807907104), T.float32(0.55000001192092896), T.float32(0.77499997615814209), T.float32(0.94375002384185791), T.float32("inf"), T.float32(-0.77499997615814209), T.float32(-0.55000001192092896), T.float32(-0.32499998807907104)) < exp_avg_unit[v_b, v_i], exp_avg_encode_8[v_b, v_i] + T.float32(4.0), exp_avg_encode_8[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_2"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_encode_4[v_b, v_i], exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_2[v_b, v_i])
                        exp_avg_encode_2[v_b, v_i] = T.Select(T.qopt_permute16(T.reinterpret("int32", exp_avg_encode_4[v_b, v_i]), T.float32(-0.55000001192092896), T.float32(-0.32499998807907104), T.float32(-0.14499999582767487), T.float32(-0.054999999701976776), T.float32(-0.01900000125169754), T.float32(-0.0027499999850988388), T.float32(0.0027499999850988388), T.float32(0.01900000125169754), T.float32(0.054999999701976776), T.float32(0.14499999582767487), T.float32(0.32499998807907104), T.float32(0.55000001192092896), T.float32(0.77499997615814209), T.float32(0.94375002384185791), T.float32("inf"), T.float32(-0.77499997615814209)) < exp_avg_unit[v_b, v_i], exp_avg_encode_4[v_b, v_i] + T.float32(2.0), exp_avg_encode_4[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_1"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_encode_2[v_b, v_i], exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_1[v_b, v_i])
                        exp_avg_encode_1[v_b, v_i] = T.Select(T.qopt_permute16(T.reinterpret("int32", exp_avg_encode_2[v_b, v_i]), T.float32(-0.77499997615814209), T.float32(-0.55000001192092896), T.float32(-0.32499998807907104), T.float32(-0.14499999582767487), T.float32(-0.054999999701976776), T.float32(-0.01900000125169754), T.float32(-0.0027499999850988388), T.float32(0.0027499999850988388), T.float32(0.01900000125169754), T.float32(0.054999999701976776), T.float32(0.14499999582767487), T.float32(0.32499998807907104), T.float32(0.55000001192092896), T.float32(0.77499997615814209), T.float32(0.94375002384185791), T.float32("inf")) < exp_avg_unit[v_b, v_i], exp_avg_encode_2[v_b, v_i] + T.float32(1.0), exp_avg_encode_2[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_code"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_encode_1[v_b, v_i])
                        T.writes(exp_avg_encode_code[v_b, v_i])
                        exp_avg_encode_code[v_b, v_i] = T.Cast("uint8", T.reinterpret("int32", exp_avg_encode_1[v_b, v_i]))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_unit"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_kept[v_b, v_i], exp_avg_sq_shift[v_b], exp_avg_sq_inverse[v_b])
                        T.writes(exp_avg_sq_unit[v_b, v_i])
                        exp_avg_sq_unit[v_b, v_i] = exp_avg_sq_kept[v_b, v_i] * exp_avg_sq_shift[v_b] * exp_avg_sq_inverse[v_b]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_scaled"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_unit[v_b, v_i])
                        T.writes(exp_avg_sq_encode_scaled[v_b, v_i])
                        exp_avg_sq_encode_scaled[v_b, v_i] = exp_avg_sq_unit[v_b, v_i] * T.float32(16.0)
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_floor"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_encode_scaled[v_b, v_i])
                        T.writes(exp_avg_sq_encode_floor[v_b, v_i])
                        exp_avg_sq_encode_floor[v_b, v_i] = T.Cast("int32", exp_avg_sq_encode_scaled[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_code"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(128), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_encode_scaled[v_b, v_i], exp_avg_sq_encode_floor[v_b, v_i])
                        T.writes(exp_avg_sq_encode_code[v_b, v_i])
                        exp_avg_sq_encode_code[v_b, v_i] = T.Cast("uint8", T.max(T.min(T.Select(T.float32(0.5) < exp_avg_sq_encode_scaled[v_b, v_i] - T.Cast("float32", exp_avg_sq_encode_floor[v_b, v_i]), exp_avg_sq_encode_floor[v_b, v_i], exp_avg_sq_encode_floor[v_b, v_i] - 1), 15), 0))
                for j_1 in T.vectorized(T.int64(32)):
                    with T.sblock("exp_avg_codes_out"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_j = T.axis.spatial(T.int64(64), i_0_m_0 * T.int64(64) + i_0_m_1 * T.int64(32) + j_1)
                        T.reads(exp_avg_encode_code[v_b, v_j * T.int64(2)])
                        T.writes(exp_avg_codes[v_b, v_j])
                        exp_avg_codes[v_b, v_j] = T.qopt_pack_pairs(exp_avg_encode_code[v_b, v_j * T.int64(2)])
                for j_1 in T.vectorized(T.int64(32)):
                    with T.sblock("exp_avg_sq_codes_out"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_j = T.axis.spatial(T.int64(64), i_0_m_0 * T.int64(64) + i_0_m_1 * T.int64(32) + j_1)
                        T.reads(exp_avg_sq_encode_code[v_b, v_j * T.int64(2)])
                        T.writes(exp_avg_sq_codes[v_b, v_j])
                        exp_avg_sq_codes[v_b, v_j] = T.qopt_pack_pairs(exp_avg_sq_encode_code[v_b, v_j * T.int64(2)])
