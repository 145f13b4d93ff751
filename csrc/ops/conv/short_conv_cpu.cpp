// short_conv on CPU: torch's products around the convolution of causal_conv1d_cpu.cpp.

#include "ops/conv/short_conv.h"

namespace liger::ops::short_conv {

namespace {

/// B, C or x of a tensor with the columns of all three.
Tensor third(const Tensor& t, int64_t i) {
  const int64_t n = t.size(2) / 3;
  return t.narrow(2, i * n, n);
}

/// The convolution of B * x.
causal_conv1d::Inputs convolution_of(const Inputs& in) {
  const int64_t n = in.channels();
  const Tensor u = at::mul(third(in.bcx, 0), third(in.bcx, 2)).contiguous();
  return {in.op, u, in.weight, in.bias, in.samples, {}, 1, false, {1, n, {n, 0, 0}}};
}

Tensor convolved(const causal_conv1d::Inputs& in) {
  const Tensor v = at::empty_like(in.x);
  causal_conv1d::Cpu::forward(in, {v});
  return v;
}

}  // namespace

void Cpu::forward(const Inputs& in, const Tensor& y) {
  Tensor out = y;
  at::mul_out(out, third(in.bcx, 1), convolved(convolution_of(in)));
}

void Cpu::backward(const Tensor& dy, const Inputs& in, const Gradients& out) {
  const auto convolution = convolution_of(in);
  Tensor du;
  if (out.dbcx.defined()) {
    Tensor dc = third(out.dbcx, 1);
    at::mul_out(dc, dy, convolved(convolution));
    du = at::empty_like(convolution.x);
  }
  causal_conv1d::Cpu::backward(
      {at::mul(dy, third(in.bcx, 1)).contiguous()}, convolution, {du, out.dweight, out.dbias, {}});
  if (!du.defined()) return;
  Tensor db = third(out.dbcx, 0), dx = third(out.dbcx, 2);
  at::mul_out(db, du, third(in.bcx, 2));
  at::mul_out(dx, du, third(in.bcx, 0));
}

}  // namespace liger::ops::short_conv
