"""Packed samples in hybrid models: what a sample becomes does not depend on its neighbours."""

import importlib
import sys
import types
import warnings

import pytest
import torch

from liger_ops import functional as F
from liger_ops.transformers import SWITCHES, apply_liger_kernel, convolutions, packing, recurrences, unpatch
from tests.support.models.language_models import known, step, tokens
from tests.support.models.patched_models import assert_as_exact, assert_same_step, through_pickle
from tests.support.models.tiny_models import WITH_CONVOLUTIONS, tiny

LENGTHS = (5, 1, 6)
# The models whose layers pass no keywords to their convolutions, or whose forward takes no positions.
NOT = {
    "mamba": "its forward takes no position_ids",
    "mamba2": "its forward takes no position_ids",
    "falcon_mamba": "its forward takes no position_ids",
    "jamba": "JambaMambaDecoderLayer passes no keywords on",
}
PACKING = [name for name in WITH_CONVOLUTIONS if name not in NOT]
QUICK = ("qwen3_next", "kimi_linear", "bamba", "lfm2")
IN_TIERS = [pytest.param(name, marks=[pytest.mark.thorough] * (name not in QUICK)) for name in known(PACKING)]
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
ENDS = torch.tensor([0, 5, 6, 12], dtype=torch.int32)


def patched(model):
    """Only its convolutions."""
    return apply_liger_kernel(model, **{name: name == "causal_conv1d" for name in SWITCHES})


def pairwise(ends):
    return [*zip(ends, ends[1:])]


def packing_row(report):
    (row,) = (row for row in report.rows if row.kind == "packing")
    return row


def first_convolution(model, monkeypatch, **arguments):
    """The result of the first convolution: behind a recurrence without its package, samples are not apart."""
    results, split = [], F.causal_conv1d_split

    def of_parts(*a, **k):
        *parts, z = split(*a, **k)
        results.append(torch.cat(parts, -1))
        return *parts, z

    with monkeypatch.context() as patch:
        for name in ("causal_conv1d", "short_conv"):
            operator = getattr(F, name)
            patch.setattr(F, name, lambda *a, f=operator, **k: (results.append(f(*a, **k)), results[-1])[1])
        patch.setattr(F, "causal_conv1d_split", of_parts)
        model(use_cache=False, **arguments)
    return results[0]


@pytest.mark.parametrize("name", IN_TIERS)
def test_convolutions_do_not_see_neighbours(name, monkeypatch):
    model, ids = tiny(name), tokens(1, 12)
    report = patched(model)
    assert packing_row(report).replacement == "causal_conv1d"
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    ends = ENDS.tolist()

    def convolved(rows):
        given = dict(inputs_embeds=embeddings[:, rows], position_ids=POSITIONS[:, rows])
        return first_convolution(model, monkeypatch, **given)

    def results(ys):
        """Of each sample, and the gradients of all embeddings for it."""
        ys = [*ys]
        return [ys, [torch.autograd.grad(y.square().sum(), embeddings, retain_graph=True)[0] for y in ys]]

    def packed():
        y = convolved(slice(None))
        return results(y[:, start:end] for start, end in pairwise(ends))

    alone = results([convolved(slice(start, end)) for start, end in pairwise(ends)])
    assert_as_exact(packed, alone, model)
    for (start, end), gradient in zip(pairwise(ends), packed()[1]):
        assert gradient[:, start:end].any() and not gradient[:, :start].any() and not gradient[:, end:].any()


@pytest.mark.parametrize("name", known(["falcon_h1", "zamba2"]))
def test_samples_are_derived_once(name, monkeypatch):
    model, ids, seen, operator = tiny(name), tokens(1, 12), [], F.causal_conv1d
    patched(model)
    monkeypatch.setattr(F, "causal_conv1d", lambda *a, **k: (seen.append(k["seq_idx"]), operator(*a, **k))[1])
    model(ids, position_ids=POSITIONS, use_cache=False)
    assert len(seen) == 2 and seen[0] is seen[1] is not None


@pytest.mark.parametrize("name", known(NOT))
def test_models_that_do_not_pass_positions_on(name):
    row = packing_row(apply_liger_kernel(tiny(name)))
    assert (row.replacement, row.reason) == ("", NOT[name])


def step_on(model, parts, **arguments):
    """Logits, and gradients of their squares' sum."""
    found, model = [], model.train()
    model.zero_grad()
    for part in parts:
        logits = model(part, use_cache=False, **arguments).logits
        logits.square().sum().backward()
        found.append(logits.detach())
    return [[torch.cat(found, 1)], [p.grad.clone() for p in model.parameters() if p.grad is not None]]


def alone(model, ids):
    """Each sample comes alone."""
    return step_on(model, ids.split(LENGTHS, 1))


def assert_apart(model, ids, expected, **arguments):
    assert_as_exact(lambda: step_on(model, [ids], **arguments), expected, model)


@pytest.mark.parametrize("arguments", [dict(position_ids=POSITIONS), dict(position_ids=POSITIONS, cu_seq_lens_q=ENDS)])
@pytest.mark.parametrize("name", known(["lfm2", "lfm2_moe", "lfm3"]))
def test_a_model_without_a_recurrence(name, arguments):
    """The whole model: transformers' attention takes positions too."""
    model, ids = tiny(name), tokens(1, 12)
    expected = alone(model, ids)
    with pytest.raises(AssertionError):
        assert_apart(model, ids, expected, position_ids=POSITIONS)
    row = packing_row(patched(model))
    assert (row.replacement, row.reason) == ("causal_conv1d", "")
    assert_apart(model, ids, expected, **arguments)
    assert_apart(through_pickle(model), ids, expected, **arguments)
    assert unpatch(model)
    with pytest.raises(AssertionError):
        assert_apart(model, ids, expected, position_ids=POSITIONS)


@pytest.mark.parametrize("name", known(["lfm2", "bamba"]))
def test_rows_of_a_batch_have_their_own_samples(name):
    """Also in a recurrence without its package."""
    model, ids = tiny(name), tokens(2, 12)
    positions = torch.stack([POSITIONS[0], torch.arange(12)])
    apply_liger_kernel(model)

    @torch.no_grad()
    def logits(part, **given):
        return model(part, use_cache=False, **given).logits

    def packed():
        found = logits(ids, position_ids=positions)
        return [[*found[:1].split(LENGTHS, 1), found[1:]]]

    assert_as_exact(packed, [[logits(part) for part in (*ids[:1].split(LENGTHS, 1), ids[1:])]], model)


def test_compiled_and_checkpointed():
    model, ids = tiny("lfm2"), tokens(1, 12)
    patched(model)
    plain = step(model, ids, position_ids=POSITIONS, use_cache=False)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_same_step(model, ids, plain, position_ids=POSITIONS, use_cache=False)
        model.gradient_checkpointing_disable()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same_step(compiled, ids, plain, position_ids=POSITIONS, use_cache=False)


@pytest.mark.parametrize("name", known(["qwen3_next", "lfm2"]))
def test_a_base_model(name):
    model = tiny(name).model
    report = apply_liger_kernel(model)
    assert packing_row(report).module == "" and report.rows[-1].reason == "its forward takes no labels"
    assert apply_liger_kernel(model).rows == report.rows
    assert torch.isfinite(model(tokens(1, 12), position_ids=POSITIONS).last_hidden_state).all()


@pytest.mark.parametrize("name", known(["lfm2", "zamba"]))
def test_rows_that_precede_the_samples(name):
    """A cache pads a prompt that is shorter than its rows."""
    model, ids = tiny(name).eval(), tokens(1, 2)
    patched(model)
    found = model(ids, position_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=True).logits
    assert torch.isfinite(found).all()
    x = torch.randn(1, 3, 5)
    assert convolutions.numbers_for(x, torch.tensor([[4, 5, 5]])).tolist() == [[4, 4, 4, 5, 5]]
    assert convolutions.numbers_for(x, None) is None


# ---- Positions


def test_numbers_and_ends():
    positions = torch.tensor([[3, 4, 0, 1, 2, 0, 0, 5]])
    assert packing.numbers_of(positions).tolist() == [[0, 0, 1, 1, 1, 2, 3, 4]]
    assert packing.ends_of(packing.numbers_of(positions)).tolist() == [0, 2, 5, 6, 7, 8]
    assert packing.ends_of(packing.numbers_of(positions[:, :2])).tolist() == [0, 2]


IDS = torch.zeros(2, 12, dtype=torch.long)


@pytest.mark.parametrize(
    "given, numbers",
    [
        (dict(input_ids=IDS, position_ids=POSITIONS), [5, 6]),
        (dict(inputs_embeds=torch.zeros(2, 12, 4), position_ids=POSITIONS.expand(2, -1)), [5, 6]),
        (dict(input_ids=IDS, position_ids=POSITIONS.expand(4, 2, -1)), [5, 6]),
        (dict(input_ids=IDS[:1], cu_seq_lens_q=ENDS, position_ids=torch.arange(12)[None]), [5, 6]),
        (dict(input_ids=IDS, position_ids=torch.arange(12)[None]), []),
        (dict(input_ids=IDS), None),
        (dict(input_ids=IDS, position_ids=POSITIONS.expand(3, 2, -1)), None),
        (dict(input_ids=IDS, position_ids=POSITIONS[:, :5]), None),
        (dict(input_ids=IDS, position_ids=POSITIONS, attention_mask=torch.ones_like(IDS)), None),
        (dict(input_ids=IDS, position_ids=POSITIONS, cache=object()), None),
        (dict(input_ids=IDS, position_ids=POSITIONS, seq_idx=IDS), None),
        (dict(position_ids=POSITIONS), None),
    ],
)
def test_when_samples_are_derived(given, numbers):
    found = packing.samples_in(given, False)
    if numbers is None:
        assert found == {}
        return
    tokens_given = given.get("input_ids", given.get("inputs_embeds"))
    assert found["seq_idx"].shape == tokens_given.shape[:2] and found["seq_idx"].dtype == torch.int32
    borders = (found["seq_idx"].diff(dim=1) != 0).nonzero()
    assert [int(at) + 1 for row, at in borders if row == 0] == numbers


# ---- Packages


@pytest.fixture
def package(monkeypatch):
    """Installs a function of a package that does not exist in place of the fallback of a model's file."""

    def install(model_type, name, function, package):
        hub = importlib.import_module("transformers.integrations.hub_kernels")
        source = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        fallback = getattr(source, name).__wrapped__
        monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(**{function.__name__: function}))
        made = hub.use_kernel_func_from_hub_with_fallback(function.__name__, package)(fallback)
        monkeypatch.setattr(source, name, made)
        return fallback

    return install


@pytest.mark.parametrize(
    "name, source", [("qwen3_next", "torch_chunk_gated_delta_rule"), ("kimi_linear", "chunk_kimi_delta_attention")]
)
def test_recurrences_get_cu_seqlens(name, source, package):
    seen = []

    def delta_rule(query, key, value, g, beta, cu_seqlens=None, **options):
        seen.append(cu_seqlens)
        bounds = [0, query.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        parts = [[t[:, a:b] for t in (query, key, value, g, beta)] for a, b in zip(bounds, bounds[1:])]
        return torch.cat([fallback(q, k, v, g=g, beta=b, **options)[0] for q, k, v, g, b in parts], 1), None

    fallback = package(name, source, delta_rule, "stand_in_fla")
    model, ids = tiny(name), tokens(1, 12)
    expected = alone(model, ids)
    row = packing_row(patched(model))
    seen.clear()
    assert_apart(model, ids, expected, position_ids=POSITIONS)
    assert seen and all(ends.tolist() == ENDS.tolist() for ends in seen)
    assert_apart(model, ids, expected, position_ids=POSITIONS, cu_seq_lens_q=ENDS)
    assert row.replacement == "causal_conv1d"


def test_scans_get_seq_idx(package):
    def chunk_scan(hidden_states, dt, A, B, C, chunk_size, seq_idx=None, D=None, **options):
        edges = [0, hidden_states.shape[1]] if seq_idx is None else packing.ends_of(seq_idx).tolist()
        parts = [[t[:, a:b] for t in (hidden_states, dt, B, C)] for a, b in zip(edges, edges[1:])]
        return torch.cat([fallback(x, t, A, b, c, chunk_size, D=D, **options) for x, t, b, c in parts], 1)

    fallback = package("bamba", "mamba2_chunk_scan", chunk_scan, "stand_in_mamba_ssm")
    model, ids = tiny("bamba"), tokens(1, 12)
    expected = alone(model, ids)
    patched(model)
    assert_apart(model, ids, expected, position_ids=POSITIONS)


def test_the_package_of_convolutions_is_not_called(package):
    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        raise AssertionError("called")

    package("lfm2", "causal_conv1d_fn", causal_conv1d_fn, "stand_in_causal_conv1d")
    model, ids = tiny("lfm2"), tokens()
    with pytest.raises(AssertionError, match="called"):
        model(ids)
    patched(model)
    assert torch.isfinite(model(ids, position_ids=POSITIONS).logits).all()


def test_the_report_says_what_a_package_computes_in_training(package):
    def split_conv1d_scan(zxbcdt, conv1d_weight, conv1d_bias, rmsnorm_weight=None, outproj_weight=None, seq_idx=None):
        return zxbcdt

    package("bamba", "mamba2_split_conv1d_scan_combined", split_conv1d_scan, "stand_in_mamba_ssm")
    report = apply_liger_kernel(tiny("bamba"))
    (row,) = (row for row in report.rows if row.kind == "conv")
    assert row.replacement == "causal_conv1d"
    expected = "in training, stand_in_mamba_ssm's mamba2_split_conv1d_scan_combined computes conv1d, rmsnorm, outproj"
    assert row.reason == expected and expected in str(report)


def test_samples_that_are_asked_for_are_told_apart_or_refused():
    """transformers raises if the recurrence cannot keep them apart."""
    model, ids = tiny("qwen3_next"), tokens(1, 12)
    expected = alone(model, ids)
    patched(model)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(ids, use_cache=False, seq_idx=POSITIONS.int())
    assert_apart(model, ids, expected, position_ids=POSITIONS, cu_seq_lens_q=ENDS)


# ---- Recurrences without their package


@pytest.fixture
def fresh(monkeypatch):
    """As if no warning was given before."""
    monkeypatch.setattr(recurrences, "_warned", set())


def warned_by(run):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in found if str(w.message).startswith("liger_ops")]


FALLBACKS = known(
    "qwen3_next kimi_linear bamba olmo_hybrid qwen3_5_text lara_mini bailing_hybrid nemotron_h zamba2 falcon_h1".split()
)


# Not granitemoehybrid, whose attention gets no positions.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (i > 2)) for i, name in enumerate(FALLBACKS)]
)
def test_fallbacks_begin_each_sample_anew(name, fresh):
    model, ids = tiny(name), tokens(1, 12)
    expected = alone(model, ids)
    row = packing_row(patched(model))
    text = "under torch.compile, packed samples share the state of their recurrence without "
    assert row.replacement == "causal_conv1d" and row.reason.startswith(text)
    assert not warned_by(lambda: assert_apart(model, ids, expected, position_ids=POSITIONS))


def test_fallbacks_run_once_without_packed_samples(monkeypatch):
    calls, function = [], recurrences.sample_by_sample
    monkeypatch.setattr(recurrences, "sample_by_sample", lambda *a: (calls.append(1), function(*a))[1])
    model, ids = tiny("qwen3_next"), tokens(2, 12)
    patched(model)
    for given, times in ((torch.arange(12)[None], 0), (POSITIONS, 1)):
        model(ids, position_ids=given, use_cache=False)
        assert len(calls) == times


def test_a_recurrence_that_is_not_told_warns_once(fresh):
    model, ids = tiny("zamba"), tokens(1, 12)
    row = packing_row(patched(model))
    assert row.reason == "packed samples share the state of their recurrence without mamba_ssm"
    assert not warned_by(lambda: model(ids, position_ids=torch.arange(12)[None], use_cache=False))
    (text,) = warned_by(lambda: [model(ids, position_ids=POSITIONS, use_cache=False) for _ in range(2)])
    assert text.startswith("liger_ops: mamba_selective_scan carries") and text.endswith(
        "install mamba_ssm, or do not pack samples"
    )


def test_fallbacks_with_a_cache_warn_once(fresh):
    """Which wants the state behind the last sample."""
    model, ids = tiny("qwen3_next").eval(), tokens(1, 12)
    patched(model)
    (text,) = warned_by(lambda: [model(ids, position_ids=POSITIONS, use_cache=True) for _ in range(2)])
    assert text.startswith(
        "liger_ops: torch_chunk_gated_delta_rule carries the state of a packed sample into the next:"
    )


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_compiled_fallbacks_warn_once(whole, fresh):
    """One graph, as without packed samples."""
    model, ids = tiny("qwen3_next"), tokens(1, 12)
    patched(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True) if whole else model
    for layer in () if whole else model.model.layers:
        layer.compile(backend="eager", fullgraph=True)

    def run():
        for positions in (POSITIONS, POSITIONS.flip(1) * 0 + torch.arange(12), torch.arange(12)[None] % 4):
            assert torch.isfinite(compiled(ids, position_ids=positions, use_cache=False).logits).all()

    (text,) = warned_by(run)
    assert "compiled" in text and "if positions restart" in text and "install flash-linear-attention" in text
