"""Seconds of training until a validation loss is reached, ours beside `nn.Transformer` in a plain loop.

    python -m benchmarks.time_to_loss --prepared FOLDER --size base --loss 4.5 --out benchmarks/results/NAME.json

Both take the same batches in the same order, with the same recipe, precision and clipping; both are validated after the
same steps, with the clock stopped. The plain loop is what a person writes: padded batches, autocast, autograd, Adam. A
step of ours is several batches, each of one length; `--one-batch` gives them to the plain loop as one, padded to the
longest, which is faster for it where a model is small.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import TorchTransformer
from experiments.passport import passport, write_result
from transduce import RunConfig, override, with_model
from transduce.config import PRESETS
from transduce.data.batches import prefetch, steps
from transduce.data.prepare import Prepared
from transduce.training.choices import choose
from transduce.training.distributed import Group
from transduce.training.recipe import adam, learning_rate, loss
from transduce.training.trainer import Share, Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--size", default="base")
    parser.add_argument("--loss", type=float, required=True, help="To be reached, of a token, without smoothing.")
    parser.add_argument("--every", type=int, default=100, help="Steps between validations.")
    parser.add_argument("--most-steps", type=int, default=5000)
    parser.add_argument("--set", nargs="*", default=[], help="Settings, as for transduce.")
    parser.add_argument("--one-batch", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepared = Prepared(options.prepared)
    n = len(prepared.subwords)
    config = with_model(PRESETS[options.size](), source_vocab_size=n, target_vocab_size=n)
    config = override(config, ["train.clip_norm=1", *options.set])
    result: dict[str, Any] = {
        "benchmark": "time_to_loss",
        "corpus": options.prepared.name,
        "size": options.size,
        "loss": options.loss,
        "settings": options.set,
        "every": options.every,
        "one_batch": options.one_batch,
    }
    with tempfile.TemporaryDirectory() as place:
        ours = trainer_of(Path(place), config, prepared, options.device)
        result["ours"] = until(options, ours, ours.take_step, lambda: ours.validation_loss().loss)
        ours.begin(config, ours.group)  # weights of its own are needed no longer
        plain = PlainLoop(ours, options.one_batch)
        result["nn.Transformer"] = until(options, ours, plain.take_step, plain.validation_loss)
    reached = [result[name]["seconds"] for name in ("ours", "nn.Transformer")]
    result["ratio"] = reached[1] / reached[0] if all(reached) else None
    if options.out:
        write_result(options.out, result | passport(config, options.device))
    print(f"ratio {result['ratio']}", flush=True)


def trainer_of(folder: Path, config: RunConfig, prepared: Prepared, device: str) -> Trainer:
    longest = int(max(of.max() for of in prepared.train.lengths()))
    choices = choose(config, device, 1, longest, deterministic=False)
    choices.apply()  # to both: else cuDNN would make a plan for every shape, and the plain loop be some times slower
    group = Group(0, 1, torch.device(device))
    return Trainer(folder, config, choices, prepared.train, prepared.valid, group, lambda event: None)


def until(
    options: argparse.Namespace,
    trainer: Trainer,
    take_step: Callable[[int, Share], None],
    validation_loss: Callable[[], float],
) -> dict[str, Any]:
    """The clock runs while steps are taken, until what was asked of the device is done."""
    shares, spent, curve = prefetch(trainer.shares(0)), 0.0, []
    for first in range(1, options.most_steps + 1, options.every):
        began = time.perf_counter()
        for step in range(first, first + options.every):
            take_step(step, next(shares))
        if options.device == "cuda":
            torch.cuda.synchronize()
        spent += time.perf_counter() - began
        curve.append([step, spent, validation_loss()])
        print(curve[-1], flush=True)
        if curve[-1][2] <= options.loss:
            break
    shares.close()  # type: ignore[attr-defined]  # a generator has it
    is_reached = curve[-1][2] <= options.loss
    return {"seconds": spent if is_reached else None, "steps": curve[-1][0], "curve": curve}


def merged(batches: Sequence[Sequence[Tensor]], pad_id: int) -> list[Tensor]:
    """One of all rows: sources, targets in, targets out."""

    def wide(some: Sequence[Tensor]) -> Tensor:
        longest = max(ids.shape[1] for ids in some)
        return torch.cat([F.pad(ids, (0, longest - ids.shape[1]), value=pad_id) for ids in some])

    return [wide([batch[i] for batch in batches]) for i in range(3)]


class PlainLoop:
    """What it shares with ours: the trainer's batches, settings and device."""

    def __init__(self, trainer: Trainer, one_batch: bool) -> None:
        self.one_batch = one_batch
        self.trainer, self.config, self.device = trainer, trainer.config, trainer.group.device
        torch.manual_seed(self.config.train.seed)
        self.model = TorchTransformer(self.config.model)
        for name, p in self.model.named_parameters():
            if name == "embedding.weight":
                nn.init.normal_(p, std=self.config.model.d_model**-0.5)
            elif p.dim() > 1:
                nn.init.xavier_uniform_(p)
        self.model.to(self.device).train()
        self.optimiser = adam(self.model.parameters(), self.config.train)

    def take_step(self, step: int, share: Share) -> None:
        settings = self.config.train
        self.optimiser.zero_grad()
        for batch in [merged(share.batches, self.config.model.pad_id)] if self.one_batch else share.batches:
            pinned = [ids.pin_memory() if self.device.type == "cuda" else ids for ids in batch]
            source_BS, target_in_BT, target_out_BT = (ids.to(self.device, non_blocking=True) for ids in pinned)
            with self.trainer.choices.autocast():
                logits_BTV = self.model(source_BS, target_in_BT)
            loss_sum, _ = loss(logits_BTV, target_out_BT, settings.label_smoothing, self.config.model.pad_id)
            (loss_sum / share.n_target_tokens).backward()
        if settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        rate = settings.rate_factor * learning_rate(step, self.config.model.d_model, settings.warmup_steps)
        self.optimiser.param_groups[0]["lr"] = rate
        self.optimiser.step()

    @torch.no_grad()
    def validation_loss(self) -> float:
        layout, pad_id = self.trainer.valid_layout, self.config.model.pad_id
        assert layout is not None
        total, n_tokens = 0.0, 0
        self.model.eval()
        order = steps(self.trainer.valid_examples, layout, self.config.model)
        for _, step in zip(range(layout.n_steps), order, strict=False):
            for batch in step.batches:
                source_BS, target_in_BT, target_out_BT = (torch.from_numpy(ids).to(self.device) for ids in batch[:3])
                with self.trainer.choices.autocast():
                    logits_BTV = self.model(source_BS, target_in_BT)
                loss_sum, _ = loss(logits_BTV, target_out_BT, 0.0, pad_id)
                total, n_tokens = total + float(loss_sum), n_tokens + batch.n_target_tokens
        self.model.train()
        return total / n_tokens


if __name__ == "__main__":
    main()
