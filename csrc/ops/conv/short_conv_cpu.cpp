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
Inputs convolution_of(const Inputs& in) {
  const int64_t n = in.channels();
  Inputs out = in;
  out.x = at::mul(third(in.x, 0), third(in.x, 2)).contiguous();
  out.columns = {1, n, {n, 0, 0}};
  return out;
}

Tensor convolved(const Inputs& in) {
  const Tensor v = at::empty_like(in.x);
  causal_conv1d::Cpu::forward(in, {v});
  return v;
}

}  // namespace

void Cpu::forward(const Inputs& in, const Tensor& y) {
  Tensor out = y;
  at::mul_out(out, third(in.x, 1), convolved(convolution_of(in)));
}

void Cpu::backward(const Tensor& dy, const Inputs& in, const Gradients& out) {
  const auto convolution = convolution_of(in);
  Tensor du;
  if (out.dx.defined()) {
    Tensor dc = third(out.dx, 1);
    at::mul_out(dc, dy, convolved(convolution));
    du = at::empty_like(convolution.x);
  }
  causal_conv1d::Cpu::backward(
      {at::mul(dy, third(in.x, 1)).contiguous()}, convolution, {du, out.dweight, out.dbias, {}});
  if (!du.defined()) return;
  Tensor db = third(out.dx, 0), dx = third(out.dx, 2);
  at::mul_out(db, du, third(in.x, 2));
  at::mul_out(dx, du, third(in.x, 0));
}

}  // namespace liger::ops::short_conv
