// hyper_pre(streams, fn, base, scale, ...) -> (x, post, comb), the way into a block of a model with hyper-connections.
// With s = streams of a token and l = (fn . flat s) * rsqrt(mean s^2 + norm_eps), by columns of l:
//
//   pre = sigmoid(l scale[0] + base) + eps, post = post_scale sigmoid(l scale[1] + base) + post_eps,
//   comb = Sinkhorn's steps on softmax(l scale[2] + base), x = sum of pre_i s_i
//
// streams: (..., N, n), of any strides; fn: (P, N n), base: (P,), scale: (1,), (2,) or (3,), for P = N (pre alone), 2 N
// (and post) or N (2 + N) (and comb), each in fp32 or streams' dtype. x: (..., n) in streams' dtype with one rounding;
// post and comb in fp32, without columns if fn has none for them. Saves streams, the parameters, l and the inverse root
// mean square. Backward goes through Sinkhorn's steps again.

#include "core/cpu/loops.h"
#include "ops/hyper/hyper.h"

namespace liger::ops::hyper_pre {
namespace {

using namespace hyper;

constexpr const char* kOp = "hyper_pre";
constexpr const char* kBackward = "hyper_pre backward";

struct Parameters {
  Tensor fn, base, scale;
};

struct Options {
  double norm_eps, eps;
  int64_t sinkhorn;
  double post_scale, post_eps;
};

struct Results {
  Tensor x, post, comb, logits, rstd;
};

struct Gradients {
  Tensor streams, fn, base, scale;
};

int64_t streams_of(const Tensor& streams) { return streams.sym_size(-2).guard_int(__FILE__, __LINE__); }
int64_t width_of(const Tensor& fn) { return fn.sym_size(0).guard_int(__FILE__, __LINE__); }

// ---- The formula, by PyTorch's operators. CUDA tensors without a kernel for their number of streams use it too.

/// The columns of a token's logits that one number of scale multiplies.
struct Group {
  int64_t first, count;
};

std::vector<Group> groups_of(int64_t streams, int64_t width) {
  std::vector<Group> found{{0, streams}};
  if (width > streams) found.push_back({streams, streams});
  if (width > 2 * streams) found.push_back({2 * streams, streams * streams});
  return found;
}

struct Formula {
  // Its products keep the dtype of sums.
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  const Tensor& streams;
  at::ScalarType type;
  Tensor fn, base, scale;
  const Options& options;
  int64_t count, width;

  Formula(const Tensor& streams, const Parameters& p, const Options& options)
      : streams(streams),
        type(core::compute_type(streams)),
        fn(p.fn.to(type)),
        base(p.base.to(type)),
        scale(p.scale.to(type)),
        options(options),
        count(streams.size(-2)),
        width(p.fn.size(0)) {}

  Tensor of(const Tensor& t, const Group& group) const { return t.narrow(-1, group.first, group.count); }

  /// logits * scale + base of a group.
  Tensor scaled(const Tensor& logits, size_t group) const {
    const auto columns = groups_of(count, width)[group];
    return of(logits, columns) * scale[group] + of(base, columns);
  }

  Tensor softmax(const Tensor& logits) const { return scaled(logits, 2).unflatten(-1, {count, count}).softmax(-1); }

  /// Sinkhorn's steps in place. sums: what each divided by, if it is given.
  void balance(Tensor& comb, std::vector<Tensor>* sums = nullptr) const {
    auto divide = [&](int64_t dim) {
      Tensor sum = comb.sum(dim, true) + options.eps;
      comb = comb / sum;
      if (sums) sums->push_back(sum);
    };
    divide(-2);
    for (int64_t step = 1; step < options.sinkhorn; ++step) divide(-1), divide(-2);
  }

  void forward(const Results& out) const {
    const Tensor s = streams.to(type), flat = s.flatten(-2);
    out.rstd.copy_((flat.square().mean(-1) + options.norm_eps).rsqrt());
    out.logits.copy_(at::matmul(flat, fn.t()) * out.rstd.unsqueeze(-1));
    const Tensor pre = scaled(out.logits, 0).sigmoid() + options.eps;
    out.x.copy_((pre.unsqueeze(-1) * s).sum(-2));
    if (width > count) out.post.copy_(options.post_scale * scaled(out.logits, 1).sigmoid() + options.post_eps);
    if (width > 2 * count) {
      Tensor comb = softmax(out.logits) + options.eps;
      balance(comb);
      out.comb.copy_(comb);
    }
  }

  Tensor softmax_gradient(const Tensor& dcomb, const Tensor& logits) const {
    const Tensor soft = softmax(logits);
    Tensor comb = soft + options.eps, d = dcomb;
    std::vector<Tensor> sums;
    balance(comb, &sums);
    for (size_t step = sums.size(); step-- > 0;) {
      const int64_t dim = step % 2 == 0 ? -2 : -1;
      d = (d - (d * comb).sum(dim, true)) / sums[step];
      comb = comb * sums[step];
    }
    return (soft * (d - (d * soft).sum(-1, true))).flatten(-2);
  }

  /// dx, dpost and dcomb may be undefined.
  void backward(
      const Gradients& out, const Tensor& dx, const Tensor& dpost, const Tensor& dcomb, const Tensor& logits,
      const Tensor& rstd) const {
    const Tensor s = streams.to(type), share = scaled(logits, 0).sigmoid();
    const auto groups = groups_of(count, width);
    std::vector<Tensor> du(groups.size());
    if (dx.defined()) du[0] = (dx.to(type).unsqueeze(-2) * s).sum(-1) * share * (1 - share);
    if (groups.size() > 1 && dpost.defined()) {
      const Tensor post = scaled(logits, 1).sigmoid();
      du[1] = dpost * options.post_scale * post * (1 - post);
    }
    if (groups.size() > 2 && dcomb.defined()) du[2] = softmax_gradient(dcomb, logits);
    std::vector<Tensor> dscale, dlogits;
    for (size_t i = 0; i < groups.size(); ++i) {
      const Tensor l = of(logits, groups[i]);
      if (!du[i].defined()) du[i] = at::zeros_like(l);
      dscale.push_back((du[i] * l).sum());
      dlogits.push_back(du[i] * scale[int64_t(i)]);
    }
    if (out.base.defined()) out.base.copy_(at::cat(du, -1).reshape({-1, width}).sum(0));
    if (out.scale.defined()) out.scale.copy_(at::stack(dscale));
    const Tensor dl = at::cat(dlogits, -1), dproduct = dl * rstd.unsqueeze(-1);
    if (out.fn.defined()) {
      out.fn.copy_(at::mm(dproduct.reshape({-1, width}).t(), s.reshape({rstd.numel(), fn.size(1)})));
    }
    if (out.streams.defined()) {
      const Tensor along = (dl * logits).sum(-1, true) * rstd.square().unsqueeze(-1) / double(fn.size(1));
      Tensor d = at::matmul(dproduct, fn).unflatten(-1, streams.sizes().slice(streams.dim() - 2));
      d = d - along.unsqueeze(-1) * s;
      if (dx.defined()) d = d + (share + options.eps).unsqueeze(-1) * dx.to(type).unsqueeze(-2);
      out.streams.copy_(d);
    }
  }
};

struct Cpu {
  static void forward(const Results& out, const Tensor& streams, const Parameters& p, const Options& options) {
    runtime::count_cpu_call();
    Formula(streams, p, options).forward(out);
  }
  static void backward(
      const Gradients& out, const Tensor& dx, const Tensor& dpost, const Tensor& dcomb, const Tensor& streams,
      const Parameters& p, const Tensor& logits, const Tensor& rstd, const Options& options) {
    runtime::count_cpu_call();
    Formula(streams, p, options).backward(out, dx, dpost, dcomb, logits, rstd);
  }
};

// ---- CUDA

namespace constants = kernels::constants::hyper_pre;

struct Cuda {
  static Parameters wide_parameters(const Parameters& p) { return {wide(p.fn), wide(p.base), wide(p.scale)}; }
  static Tensor dense(const Tensor& t, const Tensor& like, at::IntArrayRef shape) {
    return t.defined() ? t.contiguous() : at::zeros(shape, like.options());
  }

  static void forward(const Results& out, const Tensor& streams, const Parameters& given, const Options& options) {
    if (!has_kernel(streams)) return Formula(streams, given, options).forward(out);
    c10::DeviceGuard guard(streams.device());
    const Tensor s = streams.contiguous();
    const Parameters p = wide_parameters(given);
    const Tensor pieces = splits(s) ? pieces_of(p.fn, s) : Tensor();
    if (prefers<kernels::hyper_pre_fwd_hopper>(s)) {
      launch_forward<kernels::hyper_pre_fwd_hopper>(out, s, p, pieces, options);
    } else {
      launch_forward<kernels::hyper_pre_fwd>(out, s, p, pieces, options);
    }
  }

  static void backward(
      const Gradients& out, const Tensor& dx_or_none, const Tensor& dpost_or_none, const Tensor& dcomb_or_none,
      const Tensor& streams, const Parameters& given, const Tensor& logits_like, const Tensor& rstd_like,
      const Options& options) {
    if (!has_kernel(streams)) {
      return Formula(streams, given, options)
          .backward(out, dx_or_none, dpost_or_none, dcomb_or_none, logits_like, rstd_like);
    }
    c10::DeviceGuard guard(streams.device());
    const Tensor s = streams.contiguous(), logits = logits_like.contiguous(), rstd = rstd_like.contiguous();
    const Parameters p = wide_parameters(given);
    const int64_t tokens = tokens_of(kBackward, s), n = s.size(-1), width = p.fn.size(0);
    const Tensor dx = dense(dx_or_none, s, {tokens, n});
    const Tensor dpost = width > kStreams ? dense(dpost_or_none, logits, {tokens, kStreams}) : Tensor();
    const Tensor dcomb = width > 2 * kStreams ? dense(dcomb_or_none, logits, {tokens, kStreams, kStreams}) : Tensor();

    LogitGradients d;
    if (splits(s)) {
      d.pieces = at::empty({tokens, constants::PIECES * constants::WIDEST}, s.options());
    } else {
      d.dlogits = at::empty_like(logits);
    }
    d.per_token = at::empty({tokens, constants::PER_TOKEN}, logits.options());
    Tensor sums;
    if (dcomb.defined()) sums = at::empty({tokens, 2 * options.sinkhorn, kStreams}, logits.options());
    launch_logits(d, sums, dx, dpost, dcomb, s, p, logits, rstd, options);
    if (prefers<kernels::hyper_pre_bwd_hopper>(s)) {
      launch_sums<kernels::hyper_pre_bwd_hopper>(out, dx, s, p, d);
    } else {
      launch_sums<kernels::hyper_pre_bwd>(out, dx, s, p, d);
    }
  }

 private:
  /// What the first launch of backward leaves to the second.
  struct LogitGradients {
    Tensor dlogits, pieces;  // one of them
    Tensor per_token;
    Tensor partial;  // sums of the gradients of base and scale, (2, programs, width)
  };

  /// Products of streams with numbers in fp32 are sums of products with 16-bit pieces. fp16 has too few exponents.
  static bool splits(const Tensor& s) { return s.scalar_type() == at::kBFloat16; }

  template <class Hopper>
  static bool prefers(const Tensor& s) {
    return splits(s) && core::is_for<Hopper>(s.device());
  }

  static Tensor pieces_of(const Tensor& fn, const Tensor& s) {
    using K = kernels::hyper_pre_pieces;
    const Tensor pieces = at::empty({constants::PIECES - 1, fn.size(0), fn.size(1)}, s.options());
    const K::Args args{.pieces = core::address(pieces), .fn = core::address(fn), .count = int32_t(fn.numel())};
    const auto choice = core::choose<K>(args.count, args, runtime::point_of<K>(K::dtype(core::dtype_of(s))));
    core::launch(kOp, s.device(), choice, {core::programs_for(args.count, choice.config.BLOCK)}, args);
    return pieces;
  }

  template <class K>
  static void launch_forward(
      const Results& out, const Tensor& s, const Parameters& p, const Tensor& pieces, const Options& options) {
    typename K::Args args{};
    args.x = core::address(out.x), args.post = core::address(out.post), args.comb = core::address(out.comb);
    args.logits = core::address(out.logits), args.rstd = core::address(out.rstd), args.streams = core::address(s);
    args.fn = core::address(p.fn), args.pieces = core::address(pieces);
    args.base = core::address(p.base), args.scale = core::address(p.scale);
    args.tokens = tokens_of(kOp, s), args.n = int32_t(s.size(-1)), args.width = int32_t(p.fn.size(0));
    args.sinkhorn = int32_t(options.sinkhorn), args.norm_eps = float(options.norm_eps), args.eps = float(options.eps);
    args.post_scale = float(options.post_scale), args.post_eps = float(options.post_eps);
    const auto choice = hyper::choose<K>(s, args);
    core::launch(kOp, s.device(), choice, {core::programs_for(args.tokens, choice.config.BLOCK_T)}, args);
  }

  static void launch_logits(
      LogitGradients& d, const Tensor& sums, const Tensor& dx, const Tensor& dpost, const Tensor& dcomb,
      const Tensor& s, const Parameters& p, const Tensor& logits, const Tensor& rstd, const Options& options) {
    using K = kernels::hyper_pre_bwd_logits;
    K::Args args{};
    args.dlogits = core::address(d.dlogits), args.pieces = core::address(d.pieces);
    args.numbers = core::address(d.per_token), args.sums = core::address(sums);
    args.dx = core::address(dx), args.dpost = core::address(dpost), args.dcomb = core::address(dcomb);
    args.streams = core::address(s), args.logits = core::address(logits), args.rstd = core::address(rstd);
    args.base = core::address(p.base), args.scale = core::address(p.scale);
    args.tokens = int32_t(d.per_token.size(0)), args.n = int32_t(s.size(-1)), args.width = int32_t(p.fn.size(0));
    args.sinkhorn = int32_t(options.sinkhorn), args.eps = float(options.eps);
    args.post_scale = float(options.post_scale);
    const auto choice = hyper::choose<K>(s, args);
    const uint32_t programs = core::programs_for(args.tokens, choice.config.BLOCK_T);
    d.partial = at::empty({2, programs, args.width}, d.per_token.options());
    args.partial = core::address(d.partial);
    core::launch(kBackward, s.device(), choice, {programs}, args);
  }

  template <class K>
  static void launch_sums(
      const Gradients& out, const Tensor& dx, const Tensor& s, const Parameters& p, const LogitGradients& d) {
    const bool wants_fn = out.fn.defined();
    const Tensor dfn = wants_fn ? wide_result(out.fn, p.fn) : Tensor();
    const Tensor dbase = wide_result(out.base, p.base), dscale = wide_result(out.scale, p.scale);
    typename K::Args args{};
    args.dstreams = core::address(out.streams), args.dfn = core::address(dfn), args.dbase = core::address(dbase);
    args.dscale = core::address(dscale), args.dx = core::address(dx), args.streams = core::address(s);
    args.fn = core::address(p.fn), args.dlogits = core::address(d.dlogits);
    args.pieces = core::address(d.pieces), args.numbers = core::address(d.per_token);
    args.partial = core::address(d.partial), args.tokens = int32_t(d.per_token.size(0)), args.n = int32_t(s.size(-1));
    args.width = int32_t(p.fn.size(0)), args.parts = int32_t(d.partial.size(1));
    args.flags = (out.streams.defined() ? constants::NEEDS_DSTREAMS : 0) | (wants_fn ? constants::NEEDS_DFN : 0);
    const auto choice = hyper::choose<K>(s, args);
    const int64_t programs = kStreams * core::programs_for(args.n, choice.config.BLOCK_H);
    core::launch(kBackward, s.device(), choice, {uint32_t(programs)}, args);
    narrow(out.fn, dfn);
    narrow(out.base, dbase);
    narrow(out.scale, dscale);
  }
};

struct Meta {
  static void forward(const auto&...) {}
  static void backward(const auto&...) {}
};

void check(const char* op, const Tensor& streams, const Parameters& p, const Options& options) {
  check_streams(op, streams);
  const int64_t count = streams_of(streams);
  LIGER_CHECK(count >= 1, op, "streams", "have a stream", streams.sym_sizes());
  for (const auto& [name, t] :
       {std::pair<const char*, const Tensor&>("fn", p.fn), {"base", p.base}, {"scale", p.scale}}) {
    check_numbers(op, name, t, streams);
  }
  LIGER_CHECK(
      p.fn.dim() == 2 && p.fn.sym_size(1) == streams.sym_size(-1) * count, op, "fn",
      c10::str("have shape (P, ", streams.sym_size(-1) * count, "), a column for each number of a token"),
      p.fn.sym_sizes());
  const int64_t width = width_of(p.fn), all = count * (2 + count);
  LIGER_CHECK(
      width == count || width == 2 * count || width == all, op, "fn",
      c10::str("have ", count, ", ", 2 * count, " or ", all, " rows for ", count, " streams"), width);
  check_shape(op, "base", p.base, {width});
  const int64_t groups = int64_t(groups_of(count, width).size());
  check_shape(op, "scale", p.scale, {groups});
  for (const auto& [name, value] : {std::pair("norm_eps", options.norm_eps), {"eps", options.eps}}) {
    LIGER_CHECK(value >= 0 && std::isfinite(value), op, name, "be finite and not negative", value);
  }
  LIGER_CHECK(options.sinkhorn >= 1 && options.sinkhorn <= 1000, op, "sinkhorn", "lie in [1, 1000]", options.sinkhorn);
}

using Three = std::tuple<Tensor, Tensor, Tensor>;

struct Backward
    : core::Private<
          Backward,
          Four(
              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
              const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, double, int64_t, double)> {
  static constexpr const char* kName = "_hyper_pre_bwd";
  static constexpr const char* kArguments =
      "dx, dpost, dcomb, streams, fn, base, scale, logits, rstd, wanted, eps, sinkhorn, post_scale";

  template <class Device>
  static Four run(
      const OptionalTensor& dx, const OptionalTensor& dpost, const OptionalTensor& dcomb, const Tensor& streams,
      const Tensor& fn, const Tensor& base, const Tensor& scale, const Tensor& logits, const Tensor& rstd,
      int64_t wanted, double eps, int64_t sinkhorn, double post_scale) {
    const Parameters p{fn, base, scale};
    const Options options{0, eps, sinkhorn, post_scale, 0};
    check(kBackward, streams, p, options);
    auto empty = [&](int i, const Tensor& like) { return core::wants(wanted, i) ? empty_of(like) : Tensor(); };
    const Gradients out{empty(0, streams), empty(1, fn), empty(2, base), empty(3, scale)};
    Device::backward(
        out, value_or_undefined(dx), value_or_undefined(dpost), value_or_undefined(dcomb), streams, p, logits, rstd,
        options);
    return {out.streams, out.fn, out.base, out.scale};
  }
};

// No autocast: what a model computes in fp32 has fp32 parameters, and streams may have any dtype.
struct HyperPre
    : core::Operator<
          HyperPre,
          Three(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, double, int64_t, double, double)> {
  static constexpr const char* kOp = hyper_pre::kOp;
  static constexpr const char* kSchema = schemas::hyper_pre;
  using Edges = core::Positions<0, 1, 2, 3>;
  using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // and logits, rstd
  using Differentiable = core::Positions<0, 1, 2>;
  using Privates = core::Privates<Backward>;
  using Saves = core::Saves<
      core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<3>, core::Result<3>, core::Result<4>>;
  using Cpu = hyper_pre::Cpu;
  using Cuda = hyper_pre::Cuda;
  using Meta = hyper_pre::Meta;

  template <class Device>
  static Forward run(
      bool, const Tensor& streams, const Tensor& fn, const Tensor& base, const Tensor& scale, double norm_eps,
      double eps, int64_t sinkhorn, double post_scale, double post_eps) {
    const Parameters p{fn, base, scale};
    const hyper_pre::Options options{norm_eps, eps, sinkhorn, post_scale, post_eps};
    check(kOp, streams, p, options);
    const int64_t count = streams_of(streams), width = width_of(fn);
    const auto numbers = streams.options().dtype(core::compute_type(streams));
    auto empty = [&](at::TensorOptions kind, std::initializer_list<c10::SymInt> last) {
      c10::SymDimVector sizes(streams.sym_sizes().begin(), streams.sym_sizes().end() - 2);
      sizes.insert(sizes.end(), last.begin(), last.end());
      return at::empty_symint(sizes, kind.memory_format(std::nullopt));
    };
    const int64_t posts = width > count ? count : 0, combs = width > 2 * count ? count : 0;
    Results out{
        empty(streams.options(), {streams.sym_size(-1)}), empty(numbers, {posts}), empty(numbers, {combs, combs}),
        empty(numbers, {width}), empty(numbers, {})};
    Device::forward(out, streams, p, options);
    return {out.x, out.post, out.comb, out.logits, out.rstd};
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); })) {
      return core::variable_list(4);
    }
    Tensor streams = node.take(0), fn = node.take(1), base = node.take(2), scale = node.take(3);
    Tensor logits = node.take(4), rstd = node.take(5);
    const auto& [norm_eps, eps, sinkhorn, post_scale, post_eps] = node.options;
    auto [dstreams, dfn, dbase, dscale] = Backward::call(
        grads[0], grads[1], grads[2], streams, fn, base, scale, logits, rstd, node.wanted(), eps, sinkhorn, post_scale);
    return {dstreams, dfn, dbase, dscale};
  }
};

}  // namespace

LIGER_OPERATOR(HyperPre)

}  // namespace liger::ops::hyper_pre
