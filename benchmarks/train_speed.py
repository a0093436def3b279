"""Target tokens per second in training, ours beside peers: the same batch, loss, optimiser and precision, one run.

    python -m benchmarks.train_speed --quick                          # two cores, small
    python -m benchmarks.train_speed --size base --device cuda        # one GPU

Ways take turns, round after round, so that a noisy machine is noisy to all. The last line is `ratio R (low-high)`:
ours over the fastest peer, the median of the rounds and the lowest and highest round. Synthetic ids, no padding.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from experiments.passport import passport, write_result
from transduce import ModelConfig, RunConfig, Transformer
from transduce.config import PRESETS
from transduce.training.recipe import adam, loss, model_loss

LENGTH = 32
OURS = ("ours", "ours compiled")


class TorchTransformer(nn.Module):
    """nn.Transformer as its tutorial uses it, with the paper's tied and scaled embedding around it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.target_vocab_size, config.d_model)
        self.position_TD: Tensor
        self.register_buffer("position_TD", torch.randn(512, config.d_model))
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = nn.Transformer(
            config.d_model, config.n_heads, config.n_encoder_layers, config.n_decoder_layers, config.d_ff,
            config.dropout, batch_first=True,
        )  # fmt: skip
        # The paper has no dropout on attention weights and inside the feed-forward network; it costs time.
        for layer in (*self.transformer.encoder.layers, *self.transformer.decoder.layers):
            layer.dropout.p = layer.self_attn.dropout = 0.0
        for layer in self.transformer.decoder.layers:
            layer.multihead_attn.dropout = 0.0

    def embed(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(ids_BT) * self.config.d_model**0.5 + self.position_TD[: ids_BT.shape[1]]
        return self.dropout(x_BTD)  # type: ignore[no-any-return]

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        hidden_BS = source_BS == self.config.pad_id
        ahead_TT = torch.ones(2 * target_in_BT.shape[1:], dtype=torch.bool, device=source_BS.device).triu(1)
        x_BTD = self.transformer(
            self.embed(source_BS), self.embed(target_in_BT), tgt_mask=ahead_TT, tgt_is_causal=True,
            src_key_padding_mask=hidden_BS, memory_key_padding_mask=hidden_BS,
        )  # fmt: skip
        return F.linear(x_BTD, self.embedding.weight)


class Marian(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        settings = MarianConfig(
            vocab_size=config.target_vocab_size, d_model=config.d_model,
            encoder_layers=config.n_encoder_layers, decoder_layers=config.n_decoder_layers,
            encoder_attention_heads=config.n_heads, decoder_attention_heads=config.n_heads,
            encoder_ffn_dim=config.d_ff, decoder_ffn_dim=config.d_ff, activation_function="relu",
            dropout=config.dropout, attention_dropout=0.0, activation_dropout=0.0, scale_embedding=True,
            max_position_embeddings=512, pad_token_id=config.pad_id, eos_token_id=config.eos_id,
            decoder_start_token_id=config.bos_id, forced_eos_token_id=None, use_cache=False,
        )  # fmt: skip
        self.pad_id, self.model = config.pad_id, MarianMTModel(settings)

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        visible_BS = (source_BS != self.pad_id).long()
        output = self.model(input_ids=source_BS, attention_mask=visible_BS, decoder_input_ids=target_in_BT)
        return output.logits  # type: ignore[no-any-return]


class Ours(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Transformer(config)

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        return self.model(source_BS, target_in_BT).logits_BTV  # type: ignore[no-any-return]


MODELS: dict[str, type[nn.Module]] = {"ours": Ours, "nn.Transformer": TorchTransformer, "Marian": Marian}


def make_step(
    model: nn.Module, config: RunConfig, device: str, compiled: bool, bf16: bool, n_rows: int
) -> Callable[[], None]:
    """Forward, backward and Adam on one batch; fp32 weights and moments."""
    torch.manual_seed(0)
    ids = torch.randint(3, config.model.target_vocab_size, (3, n_rows, LENGTH), device=device)
    model = model.to(device).train()
    optimiser = adam(model.parameters(), config.train)
    optimiser.param_groups[0]["lr"] = 1e-4

    def loss_of(source_BS: Tensor, target_in_BT: Tensor, target_out_BT: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            if isinstance(model, Ours) and device == "cpu":  # as the trainer does it
                smoothing, n = config.train.label_smoothing, (target_out_BT != config.model.pad_id).sum()
                return model_loss(model.model, source_BS, target_in_BT, target_out_BT, smoothing, in_chunks=True) / n
            logits_BTV = model(source_BS, target_in_BT)
        loss_sum, n_tokens = loss(logits_BTV, target_out_BT, config.train.label_smoothing, config.model.pad_id)
        return loss_sum / n_tokens

    forward = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step() -> None:
        optimiser.zero_grad()
        forward(*ids).backward()
        optimiser.step()

    return step


def seconds(step: Callable[[], None], n: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(n):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / n


def measure(config: RunConfig, device: str, bf16: bool, tokens: int, rounds: int, n: int) -> dict[str, list[float]]:
    """Target tokens per second of each way, one figure a round."""
    n_rows = tokens // LENGTH
    # On two cores compiling costs minutes, which is not what this is to show.
    variants = [(name, compiled) for name in MODELS for compiled in ((False, True) if device == "cuda" else (False,))]
    if importlib.util.find_spec("transformers") is None:
        print("without Marian: transformers is not installed (make check installs it)")
        variants = [(name, compiled) for name, compiled in variants if name != "Marian"]
    steps = {}
    for name, compiled in variants:
        way = f"{name} compiled" if compiled else name
        steps[way] = make_step(MODELS[name](config.model), config, device, compiled, bf16, n_rows)
        seconds(steps[way], 3, device)  # warm up
        print(f"ready: {way}", flush=True)
        gc.collect()
    speeds: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds):
        for way, step in steps.items():
            speeds[way].append(n_rows * LENGTH / seconds(step, n, device))
    return speeds


def main(
    size: Annotated[str, typer.Option(help=", ".join(PRESETS))] = "small",
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    tokens: Annotated[int | None, typer.Option(help="Target tokens in a batch.")] = None,
    bf16: Annotated[bool | None, typer.Option(help="Autocast to bf16. On by default on a GPU.")] = None,
    rounds: int = 5,
    quick: Annotated[bool, typer.Option(help="Fewer and shorter rounds.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
) -> None:
    config = PRESETS[size]()
    on_gpu = device == "cuda"
    tokens = tokens or (25_600 if on_gpu else 1024 if quick else 4096)
    bf16 = on_gpu if bf16 is None else bf16
    speeds = measure(config, device, bf16, tokens, 3 if quick else rounds, 20 if on_gpu else 1)
    medians = {way: statistics.median(of) for way, of in speeds.items()}
    for way, median in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"{way:24} {median:12,.0f} target tokens/s")
    our_best = max((way for way in medians if way in OURS), key=lambda way: medians[way])
    peer = max((way for way in medians if way not in OURS), key=lambda way: medians[way])
    ratios = sorted(a / b for a, b in zip(speeds[our_best], speeds[peer], strict=True))
    result: dict[str, Any] = {
        "benchmark": "train_speed", "size": size, "bf16": bf16, "target_tokens_per_batch": tokens // LENGTH * LENGTH,
        "length": LENGTH, "target_tokens_per_second": speeds, "ours": our_best, "fastest_peer": peer,
        "ratio": [statistics.median(ratios), ratios[0], ratios[-1]],
    }  # fmt: skip
    if out is not None:
        write_result(out, result | passport(config, device))
    print(f"{our_best} over {peer}")
    print(f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")


if __name__ == "__main__":
    typer.run(main)
