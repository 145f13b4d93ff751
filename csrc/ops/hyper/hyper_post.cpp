// hyper_post(y, streams, post, comb) -> the streams that leave a block of a model with hyper-connections:
//
//   out_j = post_j y + sum over i of comb_ij s_i, or post_j y + s_j without comb
//
// y: (..., n); streams: (..., N, n), of any strides; post: (..., N), comb: (..., N, N), in fp32 or streams' dtype.
// Arithmetic is fp32. With `rounded`, post, comb, both products and their sum are rounded to streams' dtype, as
// separate operations would round them; without, the result alone is. Saves its inputs.

#include "core/cpu/loops.h"
#include "kernels/hyper_post.h"
#include "ops/hyper/hyper.h"

namespace liger::ops::hyper_post {
namespace {

using namespace hyper;

constexpr const char* kOp = "hyper_post";
constexpr const char* kBackward = "hyper_post backward";

struct Inputs {
  const Tensor &y, &streams, &post, &comb;
  bool rounded;
};

struct Gradients {
  Tensor y, streams, post, comb;
};

// ---- The formula, by PyTorch's operators. CUDA tensors without a kernel for their number of streams use it too.

/// t in the compute type, rounded as a step of its own if steps round.
Tensor step(const Inputs& in, const Tensor& t) {
  const auto type = core::compute_type(in.streams);
  return in.rounded ? t.to(in.streams.scalar_type()).to(type) : t.to(type);
}

void forward_formula(const Tensor& out, const Inputs& in) {
  const auto type = core::compute_type(in.streams);
  const Tensor s = in.streams.to(type), y = in.y.to(type);
  const Tensor plus = in.comb.defined() ? step(in, at::matmul(step(in, in.comb).transpose(-1, -2), s)) : s;
  out.copy_(step(in, step(in, in.post).unsqueeze(-1) * y.unsqueeze(-2)) + plus);
}

void backward_formula(const Gradients& out, const Tensor& dout, const Inputs& in) {
  const auto type = core::compute_type(in.streams);
  const Tensor d = dout.to(type), y = in.y.to(type);
  if (out.y.defined()) out.y.copy_((step(in, in.post).unsqueeze(-1) * d).sum(-2));
  if (out.streams.defined()) out.streams.copy_(in.comb.defined() ? at::matmul(step(in, in.comb), d) : d);
  if (out.post.defined()) out.post.copy_((d * y.unsqueeze(-2)).sum(-1));
  if (out.comb.defined()) out.comb.copy_(at::matmul(in.streams.to(type), d.transpose(-1, -2)));
}

struct Cpu {
  static void forward(const Tensor& out, const Inputs& in) {
    runtime::count_cpu_call();
    forward_formula(out, in);
  }
  static void backward(const Gradients& out, const Tensor& dout, const Inputs& in) {
    runtime::count_cpu_call();
    backward_formula(out, dout, in);
  }
};

// ---- CUDA

namespace constants = kernels::constants::hyper_post;

struct Cuda {
  template <class K>
  static void start(const char* op, const Tensor& s, typename K::Args& args, const Inputs& in) {
    args.tokens = tokens_of(op, s), args.n = int32_t(s.size(-1));
    args.flags |= (in.comb.defined() ? constants::HAS_COMB : 0) | (in.rounded ? constants::ROUNDED : 0);
    core::launch(op, s.device(), hyper::choose<K>(s, args), {uint32_t(args.tokens)}, args);
  }

  static void forward(const Tensor& out, const Inputs& in) {
    if (!has_kernel(in.streams)) return forward_formula(out, in);
    using K = kernels::hyper_post_fwd;
    c10::DeviceGuard guard(in.streams.device());
    const Tensor y = in.y.contiguous(), s = in.streams.contiguous(), post = wide(in.post), comb = wide(in.comb);
    K::Args args{
        .out = core::address(out),
        .y = core::address(y),
        .streams = core::address(s),
        .post = core::address(post),
        .comb = core::address(comb)};
    start<K>(kOp, s, args, in);
  }

  static void backward(const Gradients& out, const Tensor& given, const Inputs& in) {
    if (!has_kernel(in.streams)) return backward_formula(out, given, in);
    using K = kernels::hyper_post_bwd;
    c10::DeviceGuard guard(in.streams.device());
    const Tensor dout = given.contiguous(), y = in.y.contiguous(), s = in.streams.contiguous();
    const Tensor post = wide(in.post), comb = wide(in.comb);
    const Tensor dpost = wide_result(out.post, post), dcomb = comb.defined() ? wide_result(out.comb, comb) : Tensor();
    K::Args args{
        .dy = core::address(out.y),
        .dstreams = core::address(out.streams),
        .dpost = core::address(dpost),
        .dcomb = core::address(dcomb),
        .dout = core::address(dout),
        .y = core::address(y),
        .streams = core::address(s),
        .post = core::address(post),
        .comb = core::address(comb),
        .flags = (out.y.defined() ? constants::NEEDS_DY : 0) | (out.streams.defined() ? constants::NEEDS_DSTREAMS : 0)};
    start<K>(kBackward, s, args, in);
    narrow(out.post, dpost);
    narrow(out.comb, dcomb);
  }
};

struct Meta {
  static void forward(const auto&...) {}
  static void backward(const auto&...) {}
};

void check_mix(const char* op, const char* name, const Tensor& t, const Tensor& streams, int64_t dims) {
  check_numbers(op, name, t, streams);
  c10::SymDimVector wanted(streams.sym_sizes().begin(), streams.sym_sizes().end() - 1);
  if (dims == 2) wanted.push_back(streams.sym_size(-2));
  check_shape(op, name, t, wanted);
}

void check(const char* op, const Inputs& in) {
  check_streams(op, in.streams);
  core::check_same_device(op, "y", in.y, "streams", in.streams);
  core::check_dense(op, "y", in.y);
  LIGER_CHECK(
      in.y.scalar_type() == in.streams.scalar_type(), op, "y",
      c10::str("have the dtype of streams, ", in.streams.scalar_type()), in.y.scalar_type());
  c10::SymDimVector wanted(in.streams.sym_sizes().begin(), in.streams.sym_sizes().end() - 2);
  wanted.push_back(in.streams.sym_size(-1));
  check_shape(op, "y", in.y, wanted);
  check_mix(op, "post", in.post, in.streams, 1);
  if (in.comb.defined()) check_mix(op, "comb", in.comb, in.streams, 2);
}

struct Backward
    : core::Private<
          Backward,
          Four(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, int64_t, bool)> {
  static constexpr const char* kName = "_hyper_post_bwd";
  static constexpr const char* kArguments = "dout, y, streams, post, comb, wanted, rounded";

  template <class Device>
  static Four run(
      const Tensor& dout, const Tensor& y, const Tensor& streams, const Tensor& post, const OptionalTensor& comb,
      int64_t wanted, bool rounded) {
    const Tensor mix = value_or_undefined(comb);
    const Inputs in{y, streams, post, mix, rounded};
    check(kBackward, in);
    core::check_same(kBackward, "dout", dout, "streams", streams);
    auto empty = [&](int i, const Tensor& like) { return core::wants(wanted, i) ? empty_of(like) : Tensor(); };
    const Gradients out{empty(0, y), empty(1, streams), empty(2, post), empty(3, mix)};
    Device::backward(out, dout, in);
    return {out.y, out.streams, out.post, out.comb};
  }
};

struct HyperPost
    : core::Operator<HyperPost, Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, bool)> {
  static constexpr const char* kOp = hyper_post::kOp;
  static constexpr const char* kSchema = schemas::hyper_post;
  using Edges = core::Positions<0, 1, 2, 3>;
  using Saves = core::Saves<core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<3>>;
  using Privates = core::Privates<Backward>;
  using Autocast = core::AutocastPromote<0, 1>;
  using Cpu = hyper_post::Cpu;
  using Cuda = hyper_post::Cuda;
  using Meta = hyper_post::Meta;

  template <class Device>
  static Tensor run(
      bool, const Tensor& y, const Tensor& streams, const Tensor& post, const OptionalTensor& comb, bool rounded) {
    const Tensor mix = value_or_undefined(comb);
    const Inputs in{y, streams, post, mix, rounded};
    check(kOp, in);
    Tensor out = empty_of(streams);
    Device::forward(out, in);
    return out;
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor dout = std::move(grads[0]);
    if (!dout.defined()) return core::variable_list(4);
    Tensor y = node.take(0), streams = node.take(1), post = node.take(2), comb = node.take(3);
    const auto& [rounded] = node.options;
    auto [dy, dstreams, dpost, dcomb] = Backward::call(dout, y, streams, post, comb, node.wanted(), rounded);
    return {dy, dstreams, dpost, dcomb};
  }
};

}  // namespace

LIGER_OPERATOR(HyperPost)

}  // namespace liger::ops::hyper_post
