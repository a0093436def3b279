"""The model equals `torch.nn.Transformer` and Hugging Face's Marian, given the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel

from tests.support.primes import prime_config, random_ids, random_model
from transduce import ConfigError, ModelConfig, Transformer
from transduce.interop.marian import from_marian, order_of_dimensions, to_marian
from transduce.model import sinusoid

# float64: rounding differs, since the others order their products otherwise.
TOLERANCE = 1e-10


def equal_heads(**changes: object) -> ModelConfig:
    """Both others have biases in attention and d_k = d_v = d_model / n_heads."""
    return prime_config(d_model=2 * 11 * 5, n_heads=5, d_k=22, d_v=22, attention_bias=True, **changes)


# torch.nn.Transformer


class TorchTransformer(nn.Module):
    """nn.Transformer between our embedding and our projection, which it does not have."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        pre = config.norm == "pre"
        shape = (config.d_model, config.n_heads, config.n_encoder_layers, config.n_decoder_layers, config.d_ff)
        with warnings.catch_warnings():  # it warns that pre-norm rules out a shortcut of its own
            warnings.simplefilter("ignore")
            theirs = nn.Transformer(*shape, 0.0, layer_norm_eps=config.norm_eps, batch_first=True, norm_first=pre)
        self.transformer, self.encoder, self.decoder = theirs, theirs.encoder, theirs.decoder
        if not pre:  # it has a final norm in each stack under post-norm too; the paper has not
            theirs.encoder.norm = theirs.decoder.norm = None

    def forward(self, ours: Transformer, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        hidden_BS = source_BS == ours.config.pad_id
        ahead_TT = torch.ones(target_BT.shape[1], target_BT.shape[1], dtype=torch.bool).triu(1)
        x_BTD = self.transformer(
            ours.embedding.source(source_BS),
            ours.embedding.target(target_BT),
            tgt_mask=ahead_TT,
            src_key_padding_mask=hidden_BS,
            memory_key_padding_mask=hidden_BS,
        )
        return ours.embedding.logits(x_BTD)


def torch_pairs(theirs: TorchTransformer) -> Iterator[tuple[str, Tensor]]:
    """Our name, and their parameter (or a slice of it, as a view) turned to our orientation."""
    for stack in ("encoder", "decoder"):
        module = getattr(theirs, stack)
        for i, layer in enumerate(module.layers):
            attentions = {"self_attention": layer.self_attn}
            norms = ["self_attention_norm", "feed_forward_norm"]
            if stack == "decoder":
                attentions["memory_attention"] = layer.multihead_attn
                norms.insert(1, "memory_attention_norm")
            for name, attention in attentions.items():
                for part, W, b in zip(
                    "QKV", attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True
                ):
                    yield f"{stack}.{i}.{name}.W_{part}", W.T
                    yield f"{stack}.{i}.{name}.b_{part}", b
                yield f"{stack}.{i}.{name}.W_O", attention.out_proj.weight.T
                yield f"{stack}.{i}.{name}.b_O", attention.out_proj.bias
            for part, linear in (("1", layer.linear1), ("2", layer.linear2)):
                yield f"{stack}.{i}.feed_forward.W_{part}", linear.weight.T
                yield f"{stack}.{i}.feed_forward.b_{part}", linear.bias
            for name, norm in zip(norms, (layer.norm1, layer.norm2, getattr(layer, "norm3", None)), strict=False):
                yield f"{stack}.{i}.{name}.gain", norm.weight
                yield f"{stack}.{i}.{name}.bias", norm.bias
        if module.norm is not None:
            yield f"{stack}_norm.gain", module.norm.weight
            yield f"{stack}_norm.bias", module.norm.bias


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("with_attention", [False, True], ids=["fast", "with attention weights"])
def test_torch_gives_the_same_logits_and_gradients(norm: str, with_attention: bool) -> None:
    config = equal_heads(norm=norm, dropout=0.0)
    ours, (source_BS, target_BT) = random_model(config).train(), random_ids(config)
    theirs = TorchTransformer(config).double()
    weights = ours.weights()
    with torch.no_grad():
        for name, parameter in torch_pairs(theirs):
            parameter.copy_(weights.pop(name))
    assert set(weights) == {"source_embedding"}  # all else was copied

    logits_BTV = ours(source_BS, target_BT, with_attention).logits_BTV
    expected_BTV = theirs(ours, source_BS, target_BT)
    torch.testing.assert_close(logits_BTV, expected_BTV, atol=TOLERANCE, rtol=0)

    direction_BTV = torch.randn_like(logits_BTV)
    (expected_BTV * direction_BTV).sum().backward()
    expected = dict(torch_pairs(gradients_in_place(theirs))) | {"source_embedding": gradient_of_embedding(ours)}
    ours.zero_grad()
    (logits_BTV * direction_BTV).sum().backward()
    found = gradients_by_name(ours)
    assert found.keys() == expected.keys()
    largest = max(gradient.detach().abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        # Biases of keys shift all scores of a query alike, so their gradient is rounding alone: no relative bound.
        torch.testing.assert_close(found[name], gradient, atol=1e-11 * largest, rtol=0, msg=name)


def gradient_of_embedding(model: Transformer) -> Tensor:
    gradient = model.embedding.source_embedding.grad
    assert gradient is not None
    return gradient.clone()


def gradients_by_name(model: Transformer) -> dict[str, Tensor]:
    """Under the paper's names, unpacked."""
    clone = Transformer(model.config).double()
    with torch.no_grad():
        for parameter, of in zip(clone.parameters(), model.parameters(), strict=True):
            assert of.grad is not None
            parameter.copy_(of.grad)
    return clone.weights()


def gradients_in_place(module: TorchTransformer) -> TorchTransformer:
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    return module


# Hugging Face's Marian


def marian(config: ModelConfig) -> Any:
    torch.manual_seed(0)
    settings = MarianConfig(
        vocab_size=config.target_vocab_size,
        d_model=config.d_model,
        encoder_layers=config.n_encoder_layers,
        decoder_layers=config.n_decoder_layers,
        encoder_attention_heads=config.n_heads,
        decoder_attention_heads=config.n_heads,
        encoder_ffn_dim=config.d_ff,
        decoder_ffn_dim=config.d_ff,
        activation_function=config.activation,
        scale_embedding=True,
        max_position_embeddings=64,
        pad_token_id=config.pad_id,
        eos_token_id=config.eos_id,
        bos_token_id=None,
        decoder_start_token_id=config.bos_id,
        forced_eos_token_id=None,
    )
    model = MarianMTModel(settings).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.final_logits_bias.add_(torch.randn_like(model.final_logits_bias))
        # Its sinusoids are float32: once they are seen to be ours, ours take their place, so that the rest can be
        # compared in float64.
        ours_TD = sinusoid(torch.arange(64), config.d_model)[:, order_of_dimensions(config.d_model).argsort()]
        for stack in (model.model.encoder, model.model.decoder):
            torch.testing.assert_close(stack.embed_positions.weight, ours_TD, atol=1e-6, rtol=0)
            stack.embed_positions.weight.copy_(ours_TD)
    return model


MARIAN = equal_heads(activation="swish", output_bias=True, norm_eps=1e-5)


def test_marian_gives_the_same_logits() -> None:
    theirs, (source_BS, target_BT) = marian(MARIAN), random_ids(MARIAN)
    ours = from_marian(theirs)
    with torch.no_grad():
        expected = theirs(
            input_ids=source_BS, attention_mask=(source_BS != MARIAN.pad_id).long(), decoder_input_ids=target_BT
        )
        logits_BTV = ours(source_BS, target_BT).logits_BTV
    torch.testing.assert_close(logits_BTV, expected.logits, atol=TOLERANCE, rtol=0)


def test_marian_gives_the_same_logits_step_by_step_from_its_cache() -> None:
    theirs, (source_BS, target_BT) = marian(MARIAN), random_ids(MARIAN)
    state = (ours := from_marian(theirs)).start(source_BS)
    memory, cache = None, None
    for last_B in target_BT.T[:17]:
        with torch.no_grad():
            expected = theirs(
                input_ids=source_BS,
                attention_mask=(source_BS != MARIAN.pad_id).long(),
                decoder_input_ids=last_B[:, None],
                encoder_outputs=memory,
                past_key_values=cache,
                use_cache=True,
            )
        memory, cache = (expected.encoder_last_hidden_state,), expected.past_key_values
        logits_BV, state = ours.step(last_B, state)
        torch.testing.assert_close(logits_BV, expected.logits[:, -1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("start", [1, 0], ids=["own start mark", "starts with padding, as its published models do"])
def test_marian_generates_the_same_translations(start: int) -> None:
    config = equal_heads(activation="swish", output_bias=True, norm_eps=1e-5, bos_id=start)
    theirs, (source_BS, _) = marian(config), random_ids(config)
    generated = theirs.generate(
        input_ids=source_BS,
        attention_mask=(source_BS != config.pad_id).long(),
        do_sample=False,
        max_new_tokens=12,
        min_new_tokens=12,
        suppress_tokens=[config.eos_id],
    )
    ours = from_marian(theirs)
    state, last_B, found = ours.start(source_BS), torch.full((3,), start), []
    for _ in range(12):
        logits_BV, state = ours.step(last_B, state)
        logits_BV[:, config.eos_id] = -torch.inf
        last_B = logits_BV.argmax(-1)
        found.append(last_B)
    assert generated[:, 1:].tolist() == torch.stack(found, 1).tolist()


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "output_bias": True}], ids=str)
def test_to_marian_and_back_nothing_changes(changes: dict[str, Any]) -> None:
    """Norms of ours that add 1e-5, as its do: then logits are the same to the rounding of its sinusoids, float32."""
    config = prime_config(d_model=110, n_heads=5, d_k=22, d_v=22, norm_eps=1e-5, **changes)
    ours, (source_BS, target_BT) = random_model(config).eval(), random_ids(config)
    theirs = to_marian(ours, longest=64).double()
    again = from_marian(theirs)
    for name, W in ours.weights().items():
        assert torch.equal(again.weights()[name], W.float().double()), name  # it keeps them in float32
    with torch.no_grad():
        visible_BS = (source_BS != config.pad_id).long()
        expected = theirs(input_ids=source_BS, attention_mask=visible_BS, decoder_input_ids=target_BT)
    torch.testing.assert_close(again(source_BS, target_BT).logits_BTV, expected.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"norm": "pre"}, {"d_k": 16}, {"positions": "learned"}, {"attention_window": 6}], ids=str
)
def test_what_marian_cannot_be_is_refused_by_name(changes: dict[str, Any]) -> None:
    config = prime_config(**({"d_model": 110, "n_heads": 5, "d_k": 22, "d_v": 22} | changes))
    with pytest.raises(ConfigError, match=f"Marian wants model.{next(iter(changes))}="):
        to_marian(Transformer(config))
