# from typing import TypeVar
# from tvm.script import tirx as T
# from tvm.tirx.layout import Axis

nb = TypeVar("nb")
@T.prim_func(s_tir=True)
def main(hyper: T.Buffer((T.int64(9),), "float32", align=4), param: T.Buffer((nb, T.int64(256)), "float32", align=4), grad: T.Buffer((nb, T.int64(256)), "float32", align=4), exp_avg_codes: T.Buffer((nb, T.int64(256)), "uint8", align=1), exp_avg_scale: T.Buffer((nb,), "float32", align=4), exp_avg_sq_codes: T.Buffer((nb, T.int64(256)), "uint8", align=1), exp_avg_sq_scale: T.Buffer((nb,), "float32", align=4), nonfinite_count: T.Buffer((nb,), "int32", align=4)):
    T.func_attr({"tirx.noalias": True})
    # with T.sblock("root"):
    exp_avg_sq_decode_middle = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_sq_decode_decade = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_sq_old = T.sblock_alloc_buffer((nb, T.int64(256)))
    grad_scaled = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_sq_new = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_decode_offset = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_decode_middle = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_decode_decade = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_decode_magnitude = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_old = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_new = T.sblock_alloc_buffer((nb, T.int64(256)))
    finite_zero = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_kept = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_absmax = T.sblock_alloc_buffer((nb,), "int32")
    exp_avg_sq_kept = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_sq_absmax = T.sblock_alloc_buffer((nb,), "int32")
    nonfinite_sum = T.sblock_alloc_buffer((nb,), "int32")
    exp_avg_shift = T.sblock_alloc_buffer((nb,))
    exp_avg_inverse = T.sblock_alloc_buffer((nb,))
    exp_avg_unit = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_encode_y = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_encode_guess = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_encode_class = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_encode_step = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_encode_magnitude = T.sblock_alloc_buffer((nb, T.int64(256)), "uint8")
    exp_avg_sq_shift = T.sblock_alloc_buffer((nb,))
    exp_avg_sq_inverse = T.sblock_alloc_buffer((nb,))
    exp_avg_sq_unit = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_sq_encode_y = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_sq_encode_guess = T.sblock_alloc_buffer((nb, T.int64(256)))
    exp_avg_sq_encode_class = T.sblock_alloc_buffer((nb, T.int64(256)), "int32")
    exp_avg_sq_encode_step = T.sblock_alloc_buffer((nb, T.int64(256)))
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
                    with T.sblock("exp_avg_sq_decode_middle"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_codes[v_b, v_i])
                        T.writes(exp_avg_sq_decode_middle[v_b, v_i])
                        exp_avg_sq_decode_middle[v_b, v_i] = T.Cast("float32", T.Cast("int32", exp_avg_sq_codes[v_b, v_i])) + T.float32(1.5)
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_decode_decade"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_decode_middle[v_b, v_i])
                        T.writes(exp_avg_sq_decode_decade[v_b, v_i])
                        exp_avg_sq_decode_decade[v_b, v_i] = T.reinterpret("int32", exp_avg_sq_decode_middle[v_b, v_i]) >> 23
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_old"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_decode_middle[v_b, v_i], exp_avg_sq_decode_decade[v_b, v_i], exp_avg_sq_scale[v_b])
                        T.writes(exp_avg_sq_old[v_b, v_i])
                        exp_avg_sq_old[v_b, v_i] = (exp_avg_sq_decode_middle[v_b, v_i] * T.float32(18.0) + T.qopt_permute16(exp_avg_sq_decode_decade[v_b, v_i], T.float32(-32.0), T.float32(-64.0), T.float32(-128.0), T.float32(-256.0), T.float32(-512.0), T.float32(-1024.0), T.float32(-2048.0), T.float32(3575.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0))) * T.qopt_permute16(exp_avg_sq_decode_decade[v_b, v_i], T.float32(2.5000000292152436e-08), T.float32(1.2499999968440534e-07), T.float32(6.2499998421117198e-07), T.float32(3.1249999210558599e-06), T.float32(1.5625000742147677e-05), T.float32(7.8124998253770173e-05), T.float32(0.00039062500582076609), T.float32(0.0001220703125), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0)) * exp_avg_sq_scale[v_b]
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
                    with T.sblock("exp_avg_decode_offset"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_codes[v_b, v_i])
                        T.writes(exp_avg_decode_offset[v_b, v_i])
                        exp_avg_decode_offset[v_b, v_i] = T.Cast("float32", T.Cast("int32", exp_avg_codes[v_b, v_i]) - 127)
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_decode_middle"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_decode_offset[v_b, v_i])
                        T.writes(exp_avg_decode_middle[v_b, v_i])
                        exp_avg_decode_middle[v_b, v_i] = T.fabs(exp_avg_decode_offset[v_b, v_i]) + T.float32(0.5)
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_decode_decade"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_decode_middle[v_b, v_i])
                        T.writes(exp_avg_decode_decade[v_b, v_i])
                        exp_avg_decode_decade[v_b, v_i] = T.reinterpret("int32", exp_avg_decode_middle[v_b, v_i]) >> 23
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_decode_magnitude"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_decode_middle[v_b, v_i], exp_avg_decode_decade[v_b, v_i])
                        T.writes(exp_avg_decode_magnitude[v_b, v_i])
                        exp_avg_decode_magnitude[v_b, v_i] = (exp_avg_decode_middle[v_b, v_i] * T.float32(18.0) + T.qopt_permute16(exp_avg_decode_decade[v_b, v_i], T.float32(-32.0), T.float32(-64.0), T.float32(-128.0), T.float32(-256.0), T.float32(-512.0), T.float32(-1024.0), T.float32(1783.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(-16.0))) * T.qopt_permute16(exp_avg_decode_decade[v_b, v_i], T.float32(2.4999999936881068e-07), T.float32(1.249999968422344e-06), T.float32(6.2499998421117198e-06), T.float32(3.1250001484295353e-05), T.float32(0.00015624999650754035), T.float32(0.00078125001164153218), T.float32(0.000244140625), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(5.0000000584304871e-08))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_old"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_decode_magnitude[v_b, v_i], exp_avg_decode_offset[v_b, v_i], exp_avg_scale[v_b])
                        T.writes(exp_avg_old[v_b, v_i])
                        exp_avg_old[v_b, v_i] = T.reinterpret("float32", T.reinterpret("int32", exp_avg_decode_magnitude[v_b, v_i]) | T.reinterpret("int32", exp_avg_decode_offset[v_b, v_i]) & -2147483648) * exp_avg_scale[v_b]
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
        for i_0_m_0 in range(T.int64(2)):
            for i_0_m_1 in T.unroll(T.int64(2)):
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_unit"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_kept[v_b, v_i], exp_avg_shift[v_b], exp_avg_inverse[v_b])
                        T.writes(exp_avg_unit[v_b, v_i])
                        exp_avg_unit[v_b, v_i] = exp_avg_kept[v_b, v_i] * exp_avg_shift[v_b] * exp_avg_inverse[v_b]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_y"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_unit[v_b, v_i])
                        T.writes(exp_avg_encode_y[v_b, v_i])
                        exp_avg_encode_y[v_b, v_i] = T.max(T.fabs(exp_avg_unit[v_b, v_i]), T.float32(9.9999999999999995e-08))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_guess"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_encode_y[v_b, v_i])
                        T.writes(exp_avg_encode_guess[v_b, v_i])
                        exp_avg_encode_guess[v_b, v_i] = T.Cast("float32", T.reinterpret("int32", exp_avg_encode_y[v_b, v_i])) * T.float32(3.5245732169305373e-08) + T.float32(8388610.0)
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_class"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_encode_y[v_b, v_i], exp_avg_encode_guess[v_b, v_i])
                        T.writes(exp_avg_encode_class[v_b, v_i])
                        exp_avg_encode_class[v_b, v_i] = T.reinterpret("int32", T.Select(exp_avg_encode_y[v_b, v_i] <= T.qopt_permute16(T.reinterpret("int32", exp_avg_encode_guess[v_b, v_i]), T.float32(-1.0), T.float32(2.7499999077917892e-07), T.float32(9.9999988378840499e-07), T.float32(9.9999988378840499e-06), T.float32(9.9999990197829902e-05), T.float32(0.00099999993108212948), T.float32(0.0099999988451600075), T.float32(0.099999986588954926), T.float32(0.99648439884185791), T.float32(-1.0), T.float32(-1.0), T.float32(-1.0), T.float32(-1.0), T.float32(-1.0), T.float32(-1.0), T.float32(-1.0)), exp_avg_encode_guess[v_b, v_i] - T.float32(1.0), exp_avg_encode_guess[v_b, v_i]))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_step"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_encode_y[v_b, v_i], exp_avg_encode_class[v_b, v_i])
                        T.writes(exp_avg_encode_step[v_b, v_i])
                        exp_avg_encode_step[v_b, v_i] = exp_avg_encode_y[v_b, v_i] * T.qopt_permute16(exp_avg_encode_class[v_b, v_i], T.float32(0.0), T.float32(0.0), T.float32(222222.21875), T.float32(44444.4453125), T.float32(8888.888671875), T.float32(1777.77783203125), T.float32(355.5555419921875), T.float32(71.111114501953125), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0)) + T.qopt_permute16(exp_avg_encode_class[v_b, v_i], T.float32(0.0), T.float32(0.0), T.float32(-0.72222220897674561), T.float32(-0.94444441795349121), T.float32(-1.3888888359069824), T.float32(-2.2777776718139648), T.float32(-4.0555553436279297), T.float32(-7.6111111640930176), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_encode_magnitude"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_encode_step[v_b, v_i], exp_avg_encode_class[v_b, v_i])
                        T.writes(exp_avg_encode_magnitude[v_b, v_i])
                        exp_avg_encode_magnitude[v_b, v_i] = T.Cast("uint8", T.reinterpret("int32", T.Select(exp_avg_encode_step[v_b, v_i] < T.float32(-0.29999999999999999), T.float32(-1.0), exp_avg_encode_step[v_b, v_i]) + T.qopt_permute16(exp_avg_encode_class[v_b, v_i], T.float32(8388608.0), T.float32(8388609.0), T.float32(8388610.0), T.float32(8388612.0), T.float32(8388616.0), T.float32(8388624.0), T.float32(8388640.0), T.float32(8388672.0), T.float32(8388736.0), T.float32(8388608.0), T.float32(8388608.0), T.float32(8388608.0), T.float32(8388608.0), T.float32(8388608.0), T.float32(8388608.0), T.float32(8388608.0))))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_codes_out"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_unit[v_b, v_i], exp_avg_encode_magnitude[v_b, v_i])
                        T.writes(exp_avg_codes[v_b, v_i])
                        exp_avg_codes[v_b, v_i] = T.Select(exp_avg_unit[v_b, v_i] < T.float32(0.0), T.uint8(127) - T.min(exp_avg_encode_magnitude[v_b, v_i], T.uint8(127)), exp_avg_encode_magnitude[v_b, v_i] + T.uint8(127))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_unit"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_kept[v_b, v_i], exp_avg_sq_shift[v_b], exp_avg_sq_inverse[v_b])
                        T.writes(exp_avg_sq_unit[v_b, v_i])
                        exp_avg_sq_unit[v_b, v_i] = exp_avg_sq_kept[v_b, v_i] * exp_avg_sq_shift[v_b] * exp_avg_sq_inverse[v_b]
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_y"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_unit[v_b, v_i])
                        T.writes(exp_avg_sq_encode_y[v_b, v_i])
                        exp_avg_sq_encode_y[v_b, v_i] = T.max(exp_avg_sq_unit[v_b, v_i], T.float32(9.9999999999999995e-08))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_guess"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_encode_y[v_b, v_i])
                        T.writes(exp_avg_sq_encode_guess[v_b, v_i])
                        exp_avg_sq_encode_guess[v_b, v_i] = T.Cast("float32", T.reinterpret("int32", exp_avg_sq_encode_y[v_b, v_i])) * T.float32(3.5245732169305373e-08) + T.float32(8388610.0)
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_class"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_encode_y[v_b, v_i], exp_avg_sq_encode_guess[v_b, v_i])
                        T.writes(exp_avg_sq_encode_class[v_b, v_i])
                        exp_avg_sq_encode_class[v_b, v_i] = T.reinterpret("int32", T.Select(exp_avg_sq_encode_y[v_b, v_i] <= T.qopt_permute16(T.reinterpret("int32", exp_avg_sq_encode_guess[v_b, v_i]), T.float32(-1.0), T.float32(1.6250000101081241e-07), T.float32(9.9999988378840499e-07), T.float32(9.9999988378840499e-06), T.float32(9.9999990197829902e-05), T.float32(0.00099999993108212948), T.float32(0.0099999988451600075), T.float32(0.099999986588954926), T.float32(0.99824219942092896), T.float32(-1.0), T.float32(-1.0), T.float32(-1.0), T.float32(-1.0), T.float32(-1.0), T.float32(-1.0), T.float32(-1.0)), exp_avg_sq_encode_guess[v_b, v_i] - T.float32(1.0), exp_avg_sq_encode_guess[v_b, v_i]))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_encode_step"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_encode_y[v_b, v_i], exp_avg_sq_encode_class[v_b, v_i])
                        T.writes(exp_avg_sq_encode_step[v_b, v_i])
                        exp_avg_sq_encode_step[v_b, v_i] = exp_avg_sq_encode_y[v_b, v_i] * T.qopt_permute16(exp_avg_sq_encode_class[v_b, v_i], T.float32(0.0), T.float32(1800000.0), T.float32(444444.4375), T.float32(88888.890625), T.float32(17777.77734375), T.float32(3555.5556640625), T.float32(711.111083984375), T.float32(142.22222900390625), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0)) + T.qopt_permute16(exp_avg_sq_encode_class[v_b, v_i], T.float32(0.0), T.float32(-0.49000000953674316), T.float32(-0.94444441795349121), T.float32(-1.3888888359069824), T.float32(-2.2777776718139648), T.float32(-4.0555553436279297), T.float32(-7.6111111640930176), T.float32(-14.722222328186035), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0), T.float32(0.0))
                for i_1 in T.vectorized(T.int64(64)):
                    with T.sblock("exp_avg_sq_codes_out"):
                        v_b = T.axis.spatial(nb, b_m_m)
                        v_i = T.axis.spatial(T.int64(256), i_0_m_0 * T.int64(128) + i_0_m_1 * T.int64(64) + i_1)
                        T.reads(exp_avg_sq_encode_step[v_b, v_i], exp_avg_sq_encode_class[v_b, v_i])
                        T.writes(exp_avg_sq_codes[v_b, v_i])
                        exp_avg_sq_codes[v_b, v_i] = T.Cast("uint8", T.reinterpret("int32", T.Select(exp_avg_sq_encode_step[v_b, v_i] < T.float32(-0.29999999999999999), T.float32(-1.0), exp_avg_sq_encode_step[v_b, v_i]) + T.qopt_permute16(exp_avg_sq_encode_class[v_b, v_i], T.float32(8388608.0), T.float32(8388609.0), T.float32(8388611.0), T.float32(8388615.0), T.float32(8388623.0), T.float32(8388639.0), T.float32(8388671.0), T.float32(8388735.0), T.float32(8388863.0), T.float32(8388608.0), T.float32(8388608.0), T.float32(8388608.0), T.float32(8388608.0), T.float32(8388608.0), T.float32(8388608.0), T.float32(8388608.0))))
