# from typing import TypeVar
# from tvm.script import tirx as T
# from tvm.tirx.layout import Axis

nb = TypeVar("nb")
@T.prim_func(s_tir=True)
def main(hyper: T.Buffer((T.int64(9),), "float32", align=4), param: T.Buffer((nb, T.int64(256)), "float32", align=4), grad: T.Buffer((nb, T.int64(256)), "float32", align=4), exp_avg: T.Buffer((nb, T.int64(256)), "float32", align=4), exp_avg_sq: T.Buffer((nb, T.int64(256)), "float32", align=4), nonfinite_count: T.Buffer((nb,), "int32", align=4)):
    T.func_attr({"tirx.noalias": True})
    # with T.sblock("root"):
    exp_avg_sq_old = T.sblock_alloc_buffer((nb, T.int64(256)))
    grad_scaled = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_sq_new = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_old = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_new = T.sblock_alloc_buffer((nb, T.int64(256)))
    finite_zero = T.sblock_alloc_buffer((nb, T.int64(256)))
    nonfinite_sum = T.sblock_alloc_buffer((nb,), "int32")
    exp_avg_kept = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_sq_kept = T.sblock_alloc_buffer((nb, T.int64(256)))
    param_old = T.sblock_alloc_buffer((nb, T.int64(256)))
    param_new = T.sblock_alloc_buffer((nb, T.int64(256)))
    nonfinite_sum_rf = T.sblock_alloc_buffer((nb, T.int64(64)), "int32")
    for b_m_m in T.parallel(nb):
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
                        T.reads(exp_avg_sq[v_b, v_i])
                        T.writes(exp_avg_sq_old[v_b, v_i])
                        exp_avg_sq_old[v_b, v_i] = exp_avg_sq[v_b, v_i]
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
                        T.reads(exp_avg[v_b, v_i])
                        T.writes(exp_avg_old[v_b, v_i])
                        exp_avg_old[v_b, v_i] = exp_avg[v_b, v_i]
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
                    with T.sblock("exp_avg_out"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_kept[v_b, v_i])
                        T.writes(exp_avg[v_b, v_i])
                        exp_avg[v_b, v_i] = exp_avg_kept[v_b, v_i]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_kept"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(finite_zero[v_b, v_i], exp_avg_sq_new[v_b, v_i], exp_avg_sq_old[v_b, v_i])
                        T.writes(exp_avg_sq_kept[v_b, v_i])
                        exp_avg_sq_kept[v_b, v_i] = T.Select(finite_zero[v_b, v_i] == T.float32(0.0), exp_avg_sq_new[v_b, v_i], exp_avg_sq_old[v_b, v_i])
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_out"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_kept[v_b, v_i])
                        T.writes(exp_avg_sq[v_b, v_i])
                        exp_avg_sq[v_b, v_i] = exp_avg_sq_kept[v_b, v_i]
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
                for nonfinite_sum_k_1 in T.vectorized(T.int64(64)):
                    with T.sblock("nonfinite_sum_rf_update"):
                        vnonfinite_sum_k_1 = T.axis.spatial(T.int64(64), nonfinite_sum_k_1)
                        v_b = T.axis.spatial(nb, b_m_m)
                        vnonfinite_sum_k_0 = T.axis.reduce(T.int64(4), i_0_m_0 * T.int64(2) + i_0_m_1)
                        T.reads(nonfinite_sum_rf[v_b, vnonfinite_sum_k_1], finite_zero[v_b, vnonfinite_sum_k_0 * T.int64(64) + vnonfinite_sum_k_1])
                        T.writes(nonfinite_sum_rf[v_b, vnonfinite_sum_k_1])
                        nonfinite_sum_rf[v_b, vnonfinite_sum_k_1] = nonfinite_sum_rf[v_b, vnonfinite_sum_k_1] + T.Select(finite_zero[v_b, vnonfinite_sum_k_0 * T.int64(64) + vnonfinite_sum_k_1] == T.float32(0.0), 0, 1)
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
