"""Torch replacements of the Gated DeltaNet kernels, beside transformers' own and plain loops."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from engine_patches.cpu_platform.gdn import convolution, delta_rule, gates, projections, snapshots

LENGTHS = (1, 63, 64, 65, 130)  # about the chunk of 64
SLOTS = (3, 0, 5, 2, 6)
KEYS, VALUES, DIM = 2, 4, 16  # heads of each, GQA group of 2


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def starts(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def spans(lengths):
    ends = starts(lengths).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


@pytest.fixture
def prompt():
    """q, k, v, g, beta of all LENGTHS end to end, and a pool of states."""
    total = sum(LENGTHS)
    q, k = torch.randn(2, 1, total, KEYS, DIM).unbind(0)
    v = torch.randn(1, total, VALUES, DIM)
    g = -torch.rand(1, total, VALUES) * 3
    return q, k, v, g, torch.rand(1, total, VALUES), torch.randn(8, VALUES, DIM, DIM)


def by_the_token(prompt, part: slice, slot: int, length: int | None = None):
    """transformers' recurrence over one sequence: outputs, and the state after ``length``."""
    q, k, v, g, beta, pool = prompt
    stop = part.stop if length is None else part.start + length
    part = slice(part.start, stop)
    heads = [x[:, part].repeat_interleave(VALUES // KEYS, 2) for x in (q, k)]
    out, state = torch_recurrent_gated_delta_rule(
        *heads, v[:, part], g[:, part], beta[:, part], initial_state=pool[slot][None].mT.clone(),
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out[0], state[0].mT


def chunked(prompt, **changed):
    q, k, v, g, beta, pool = prompt
    given = {
        "initial_state": pool.clone(), "initial_state_indices": torch.tensor(SLOTS),
        "cu_seqlens": starts(LENGTHS), "use_qk_l2norm_in_kernel": True,
    } | changed  # fmt: skip
    out, none, states = delta_rule.chunk_gated_delta_rule(q, k, v, g, beta, **given)
    assert none is None
    return out[0], states[0], given["initial_state"]


def test_prefill_in_chunks_is_the_recurrence(prompt):
    out, _, pool = chunked(prompt)
    for part, slot in zip(spans(LENGTHS), SLOTS, strict=True):
        expected, state = by_the_token(prompt, part, slot)
        torch.testing.assert_close(out[part], expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(pool[slot], state, atol=2e-5, rtol=1e-4)
    untouched = [slot for slot in range(8) if slot not in SLOTS]
    assert torch.equal(pool[untouched], prompt[-1][untouched])


def test_states_between_chunks_are_what_a_shorter_prompt_ends_with(prompt):
    _, states, _ = chunked(prompt)
    at = 0
    for part, slot, length in zip(spans(LENGTHS), SLOTS, LENGTHS, strict=True):
        for before in range(0, length, delta_rule.CHUNK):
            want = by_the_token(prompt, part, slot, before)[1] if before else prompt[-1][slot]
            torch.testing.assert_close(states[at], want, atol=2e-5, rtol=1e-4)
            at += 1
    assert at == len(states)


def test_prefill_that_leaves_the_pool_alone(prompt):
    out, _, pool = chunked(prompt, inplace_update=False)
    assert torch.equal(pool, prompt[-1])
    assert torch.equal(out, chunked(prompt)[0])


def test_strong_decay_stays_finite(prompt):
    """A whole chunk's decay under- and overflows fp32 unless only differences are raised."""
    q, k, v, g, beta, pool = prompt
    out, states, after = chunked((q, k, v, g * 100, beta, pool))
    assert all(bool(x.isfinite().all()) for x in (out, states, after))


def test_a_decoded_token_is_a_prefill_of_one(prompt):
    q, k, v, _, _, pool = prompt
    batch, real = 5, [0, 1, 3, 4]
    slots = torch.tensor([3, 0, -1, 2, 6], dtype=torch.int32)
    a, b = torch.randn(2, batch, VALUES).unbind(0)
    decay, bias = torch.randn(2, VALUES).unbind(0)
    mixed = torch.cat([x[0, :batch].flatten(1) for x in (q, k, v)], 1)
    out, states = torch.full((batch, 1, VALUES, DIM), torch.nan), pool.clone()
    delta_rule.fused_recurrent_gated_delta_rule_packed_decode(
        mixed, a, b, decay, bias, DIM**-0.5, states, out, slots, use_qk_l2norm_in_kernel=True
    )
    g, beta = delta_rule.fused_gdn_gating(decay, a, b, bias)
    expected, want = chunked(
        (q[:, real], k[:, real], v[:, real], g[:, real], beta[:, real], pool),
        initial_state_indices=slots[real], cu_seqlens=torch.arange(5),
    )[::2]  # fmt: skip
    torch.testing.assert_close(out[real, 0], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states, want, atol=1e-5, rtol=1e-4)
    assert not out[2].any(), "a padded row is zeros"


def test_gating_is_the_models():
    """As Qwen3_5GatedDeltaNet computes g and beta."""
    a, b = torch.randn(2, 7, VALUES).mul(30).unbind(0)
    decay, bias = torch.randn(2, VALUES).unbind(0)
    g, beta = delta_rule.fused_gdn_gating(decay, a, b, bias)
    torch.testing.assert_close(g[0], -decay.exp() * F.softplus(a + bias))
    torch.testing.assert_close(beta[0], b.sigmoid())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution_in_parts_is_the_whole(bias, activation):
    """Cold, continued, and token by token: all as one convolution over the whole sequence."""
    width, dim, split = 4, 6, (40, 30, 3)
    weight, offset = torch.randn(dim, width), torch.randn(dim) if bias else None
    whole = [torch.randn(sum(split), dim) for _ in range(2)]
    slots, pool = torch.tensor([4, 1]), torch.full((6, dim, width - 1), 7.0)
    expected = [F.conv1d(
        F.pad(x.T, (width - 1, 0))[None], weight[:, None], offset, groups=dim
    )[0].T for x in whole]  # fmt: skip
    expected = [F.silu(x) if activation else x for x in expected]
    got, at = [[], []], 0
    for n, continued in ((split[0], False), (split[1], True)):
        both = torch.cat([x[at : at + n] for x in whole]).T
        out = convolution.causal_conv1d_fn(
            both, weight, offset, pool, starts([n, n]), [n, n], slots,
            torch.tensor([continued] * 2), activation,
        ).T  # fmt: skip
        for i in range(2):
            got[i].append(out[i * n : (i + 1) * n])
        at += n
    for step in range(at, sum(split)):
        both = torch.stack([x[step] for x in whole])
        out = convolution.causal_conv1d_update(
            both, pool, weight, offset, activation, conv_state_indices=slots
        )
        for i in range(2):
            got[i].append(out[i : i + 1])
    for i in range(2):
        torch.testing.assert_close(torch.cat(got[i]), expected[i], atol=1e-5, rtol=1e-4)
    assert (pool[[0, 2, 3, 5]] == 7).all(), "other slots are left alone"


def test_convolution_of_less_than_its_width_keeps_the_older_inputs():
    pool, weight = torch.zeros(1, 2, 3), torch.ones(2, 4)
    pool[0] = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    convolution.causal_conv1d_fn(
        torch.tensor([[9.0], [8.0]]), weight, None, pool, starts([1]), [1], torch.tensor([0]),
        torch.tensor([True]),
    )  # fmt: skip
    assert pool[0].tolist() == [[2, 3, 9], [5, 6, 8]]


def test_padded_sequences_write_no_state():
    pool, weight = torch.ones(2, 2, 3), torch.ones(2, 4)
    convolution.causal_conv1d_fn(
        torch.randn(2, 4), weight, None, pool, starts([4]), [4], torch.tensor([-1])
    )
    convolution.causal_conv1d_update(
        torch.randn(1, 2), pool, weight, conv_state_indices=torch.tensor([-1])
    )
    assert (pool == 1).all()


def test_speculative_arguments_are_refused():
    with pytest.raises(NotImplementedError, match="num_accept_tokens"):
        convolution.causal_conv1d_update(
            torch.randn(1, 2), torch.ones(2, 2, 3), torch.ones(2, 4),
            num_accept_tokens=torch.ones(1),
        )  # fmt: skip


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
def test_projections_come_apart_by_head(layout):
    """Every number is named by its part, head and place; both layouts give the same parts."""
    group, tokens = VALUES // KEYS, 3
    names = {
        "q": torch.arange(KEYS * DIM), "k": 100 + torch.arange(KEYS * DIM),
        "v": 200 + torch.arange(VALUES * DIM), "z": 300 + torch.arange(VALUES * DIM),
        "b": 400 + torch.arange(VALUES), "a": 500 + torch.arange(VALUES),
    }  # fmt: skip
    per = {"q": DIM, "k": DIM, "v": group * DIM, "z": group * DIM, "b": group, "a": group}
    if layout == "contiguous":
        packed = [torch.cat([names[n] for n in part]) for part in ("qkvz", "ba")]
        split = projections.fused_qkvzba_split_reshape_cat_contiguous
    else:
        packed = [
            torch.cat([names[n][h * per[n] : (h + 1) * per[n]] for h in range(KEYS) for n in part])
            for part in ("qkvz", "ba")
        ]
        split = projections.fused_qkvzba_split_reshape_cat
    rows = [x.float().expand(tokens, -1) for x in packed]
    mixed, z, b, a = split(*rows, KEYS, VALUES, DIM, DIM)
    want = torch.cat([names[n] for n in "qkv"]).float()
    assert torch.equal(mixed, want.expand(tokens, -1))
    assert torch.equal(z, names["z"].view(VALUES, DIM).float().expand(tokens, -1, -1))
    assert torch.equal(b, names["b"].float().expand(tokens, -1))
    assert torch.equal(a, names["a"].float().expand(tokens, -1))


def test_gated_norms_are_transformers():
    reference = Qwen3_5RMSNormGated(DIM, eps=1e-5)
    torch.nn.init.uniform_(reference.weight)
    x, gate = torch.randn(2, 9, DIM).unbind(0)
    expected = reference(x, gate)
    fused = _norm(weight=reference.weight, eps=1e-5, activation="silu")
    torch.testing.assert_close(gates.fused_gated_rms_norm(fused, x, gate), expected)
    plain = _norm(
        weight=reference.weight, eps=1e-5, activation="swish", group_size=None,
        norm_before_gate=True,
    )  # fmt: skip
    torch.testing.assert_close(gates.gated_rms_norm(plain, x, gate), expected)


@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("before", [True, False])
def test_grouped_norm_is_sglangs_reference(group_size, before):
    from sglang.kernels.ops.attention.fla.layernorm_gated import rms_norm_ref

    x, gate, weight = torch.randn(9, DIM), torch.randn(9, DIM), torch.rand(DIM)
    norm = _norm(
        weight=weight, eps=1e-5, activation="swish", group_size=group_size,
        norm_before_gate=before,
    )  # fmt: skip
    want = rms_norm_ref(x, weight, None, gate, 1e-5, group_size, before)
    torch.testing.assert_close(gates.gated_rms_norm(norm, x, gate), want)


def _norm(**attributes):
    return type("Norm", (), attributes)()


def test_output_gates():
    x, gate = torch.randn(5, 12), torch.randn(5, 3, 8)[..., :4]  # strided, as the models give it
    want = x * gate.reshape(5, 12).sigmoid()
    torch.testing.assert_close(gates.fused_sigmoid_mul(x, gate), want)
    assert gates.fused_sigmoid_mul(x, gate, inplace=True) is x
    torch.testing.assert_close(x, want)


def test_shared_expert_gate():
    hidden, weight, shared, routed = torch.randn(5, 6), torch.randn(6), *torch.randn(2, 5, 6)
    want = (hidden @ weight).sigmoid()[:, None] * shared
    torch.testing.assert_close(gates.fused_gate_sigmoid_mul(hidden, weight, shared), want)
    expected = routed + want
    gates.fused_gate_sigmoid_mul_add(hidden, weight, shared, routed)
    torch.testing.assert_close(routed, expected)


@pytest.mark.parametrize("layers", ["one", "all"])
def test_snapshots_copy_only_what_is_asked(layers):
    conv, ssm = torch.randn(2, 6, 3, 3), torch.randn(2, 6, 2, 4, 4)
    before = conv.clone(), ssm.clone()
    source, target = torch.tensor([1, 2, -1, 3]), torch.tensor([4, 5, 0, 0])
    mask = torch.tensor([True, False, True, True])
    if layers == "all":
        snapshots.track_mamba_states_all_layers(conv, ssm, source, mask, target, 3, True)
    else:
        for layer in range(2):
            snapshots.track_mamba_states_if_needed(
                conv[layer], ssm[layer], source, mask, target, 3, True
            )
    for pool, old in zip((conv, ssm), before, strict=True):
        assert torch.equal(pool[:, 4], old[:, 1])
        assert torch.equal(pool[:, [0, 1, 2, 3, 5]], old[:, [0, 1, 2, 3, 5]])
