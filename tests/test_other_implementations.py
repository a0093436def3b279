"""The model gives the same results as `torch.nn.Transformer` and Hugging Face's Marian, with the same weights."""

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

# For float64. The other implementations compute sums in another order, so rounding differs.
TOLERANCE = 1e-10


def equal_heads(**changes: object) -> ModelConfig:
    """The other implementations have biases in attention, and d_k = d_v = d_model / n_heads."""
    return prime_config(d_model=2 * 11 * 5, n_heads=5, d_k=22, d_v=22, attention_bias=True, **changes)


# torch.nn.Transformer


class TorchTransformer(nn.Module):
    """nn.Transformer has no embedding and no output projection, so this class uses those of our model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        pre = config.norm == "pre"
        shape = (config.d_model, config.n_heads, config.n_encoder_layers, config.n_decoder_layers, config.d_ff)
        with warnings.catch_warnings():  # PyTorch warns that it cannot use nested tensors with pre-norm
            warnings.simplefilter("ignore")
            stacks = nn.Transformer(*shape, 0.0, layer_norm_eps=config.norm_eps, batch_first=True, norm_first=pre)
        self.transformer, self.encoder, self.decoder = stacks, stacks.encoder, stacks.decoder
        if not pre:  # nn.Transformer has a final norm in each stack with post-norm too, unlike the paper
            stacks.encoder.norm = stacks.decoder.norm = None

    def forward(self, ours: Transformer, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        hidden_BS = source_BS == ours.config.pad_id
        hidden_TT = torch.ones(target_BT.shape[1], target_BT.shape[1], dtype=torch.bool).triu(1)
        x_BTD = self.transformer(
            ours.embedding.source(source_BS),
            ours.embedding.target(target_BT),
            tgt_mask=hidden_TT,
            src_key_padding_mask=hidden_BS,
            memory_key_padding_mask=hidden_BS,
        )
        return ours.embedding.logits(x_BTD)


def torch_parameters(torch_model: TorchTransformer) -> Iterator[tuple[str, Tensor]]:
    """PyTorch's parameters, as views in our orientation, with our names."""
    for stack in ("encoder", "decoder"):
        module = getattr(torch_model, stack)
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
    torch_model = TorchTransformer(config).double()
    weights = ours.weights()
    with torch.no_grad():
        for name, parameter in torch_parameters(torch_model):
            parameter.copy_(weights.pop(name))
    assert set(weights) == {"source_embedding"}  # all other weights were copied

    logits_BTV = ours(source_BS, target_BT, with_attention).logits_BTV
    expected_BTV = torch_model(ours, source_BS, target_BT)
    torch.testing.assert_close(logits_BTV, expected_BTV, atol=TOLERANCE, rtol=0)

    direction_BTV = torch.randn_like(logits_BTV)
    (expected_BTV * direction_BTV).sum().backward()
    replace_parameters_by_gradients(torch_model)
    expected = dict(torch_parameters(torch_model)) | {"source_embedding": gradient_of_embedding(ours)}
    ours.zero_grad()
    (logits_BTV * direction_BTV).sum().backward()
    gradients = gradients_by_name(ours)
    assert gradients.keys() == expected.keys()
    largest = max(gradient.detach().abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        # The bias of keys changes all scores of a query equally. Its gradient is only rounding: no relative tolerance.
        torch.testing.assert_close(gradients[name], gradient, atol=1e-11 * largest, rtol=0, msg=name)


def gradient_of_embedding(model: Transformer) -> Tensor:
    gradient = model.embedding.source_embedding.grad
    assert gradient is not None
    return gradient.clone()


def gradients_by_name(model: Transformer) -> dict[str, Tensor]:
    """The gradients, unpacked, by the paper's names."""
    clone = Transformer(model.config).double()
    with torch.no_grad():
        for cloned, parameter in zip(clone.parameters(), model.parameters(), strict=True):
            assert parameter.grad is not None
            cloned.copy_(parameter.grad)
    return clone.weights()


def replace_parameters_by_gradients(module: TorchTransformer) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)


# Hugging Face's Marian


def random_marian(config: ModelConfig) -> Any:
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
        # Marian's sinusoids have float32 precision. They are compared with ours, and then replaced by ours, so that
        # everything else can be compared in float64.
        ours_TD = sinusoid(torch.arange(64), config.d_model)[:, order_of_dimensions(config.d_model).argsort()]
        for stack in (model.model.encoder, model.model.decoder):
            torch.testing.assert_close(stack.embed_positions.weight, ours_TD, atol=1e-6, rtol=0)
            stack.embed_positions.weight.copy_(ours_TD)
    return model


CONFIG = equal_heads(activation="swish", output_bias=True, norm_eps=1e-5)


def test_marian_gives_the_same_logits() -> None:
    marian, (source_BS, target_BT) = random_marian(CONFIG), random_ids(CONFIG)
    ours = from_marian(marian)
    with torch.no_grad():
        expected = marian(
            input_ids=source_BS, attention_mask=(source_BS != CONFIG.pad_id).long(), decoder_input_ids=target_BT
        )
        logits_BTV = ours(source_BS, target_BT).logits_BTV
    torch.testing.assert_close(logits_BTV, expected.logits, atol=TOLERANCE, rtol=0)


def test_marian_with_its_cache_gives_the_same_logits_at_each_step() -> None:
    marian, (source_BS, target_BT) = random_marian(CONFIG), random_ids(CONFIG)
    state = (ours := from_marian(marian)).start(source_BS)
    memory, cache = None, None
    for last_B in target_BT.T[:17]:
        with torch.no_grad():
            expected = marian(
                input_ids=source_BS,
                attention_mask=(source_BS != CONFIG.pad_id).long(),
                decoder_input_ids=last_B[:, None],
                encoder_outputs=memory,
                past_key_values=cache,
                use_cache=True,
            )
        memory, cache = (expected.encoder_last_hidden_state,), expected.past_key_values
        logits_BV, state = ours.step(last_B, state)
        torch.testing.assert_close(logits_BV, expected.logits[:, -1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("bos_id", [1, 0], ids=["start mark", "padding as start mark, like published Marian models"])
def test_marian_generates_the_same_tokens(bos_id: int) -> None:
    config = equal_heads(activation="swish", output_bias=True, norm_eps=1e-5, bos_id=bos_id)
    marian, (source_BS, _) = random_marian(config), random_ids(config)
    generated = marian.generate(
        input_ids=source_BS,
        attention_mask=(source_BS != config.pad_id).long(),
        do_sample=False,
        max_new_tokens=12,
        min_new_tokens=12,
        suppress_tokens=[config.eos_id],
    )
    ours = from_marian(marian)
    state, last_B, tokens = ours.start(source_BS), torch.full((3,), bos_id), []
    for _ in range(12):
        logits_BV, state = ours.step(last_B, state)
        logits_BV[:, config.eos_id] = -torch.inf
        last_B = logits_BV.argmax(-1)
        tokens.append(last_B)
    assert generated[:, 1:].tolist() == torch.stack(tokens, 1).tolist()


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "output_bias": True}], ids=str)
def test_conversion_to_marian_and_back_keeps_weights_and_logits(changes: dict[str, Any]) -> None:
    """With Marian's norm_eps, 1e-5, logits differ only by the float32 rounding of Marian's sinusoids."""
    config = prime_config(d_model=110, n_heads=5, d_k=22, d_v=22, norm_eps=1e-5, **changes)
    ours, (source_BS, target_BT) = random_model(config).eval(), random_ids(config)
    marian = to_marian(ours, n_positions=64).double()
    converted_back = from_marian(marian)
    for name, W in ours.weights().items():
        assert torch.equal(converted_back.weights()[name], W.float().double()), name  # to_marian gives float32
    with torch.no_grad():
        visible_BS = (source_BS != config.pad_id).long()
        expected = marian(input_ids=source_BS, attention_mask=visible_BS, decoder_input_ids=target_BT)
    logits_BTV = converted_back(source_BS, target_BT).logits_BTV
    torch.testing.assert_close(logits_BTV, expected.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"norm": "pre"}, {"d_k": 16}, {"positions": "learned"}, {"attention_window": 6}], ids=str
)
def test_marian_export_refuses_unsupported_settings(changes: dict[str, Any]) -> None:
    config = prime_config(**({"d_model": 110, "n_heads": 5, "d_k": 22, "d_v": 22} | changes))
    with pytest.raises(ConfigError, match=f"Marian requires model.{next(iter(changes))}="):
        to_marian(Transformer(config))
