"""Seconds of training until a validation loss is reached, by our trainer and by `nn.Transformer` in a plain loop.

    python -m benchmarks.time_to_loss --prepared FOLDER --size base --loss 4.5 --out benchmarks/results/NAME.json

Both use the same batches in the same order, and the same recipe, precision and clipping. Both are validated after the
same steps, and the time for validation is not counted. The plain loop is a usual training loop: padded batches,
autocast, autograd and Adam. A step of our trainer consists of several batches, each of one shape. With
`--one-batch` the plain loop joins them into one batch, padded to the longest, which is faster if the model is small.
"""

# Axes: B sentences, S source positions, T target positions, V vocabulary.

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
from transduce.training.recipe import adam, learning_rate, loss
from transduce.training.settle import longest_sentence, make_trainer
from transduce.training.share import Share, Tensors
from transduce.training.trainer import Trainer

NO_VALIDATION = "the prepared folder has no validation pairs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--size", default="base")
    parser.add_argument(
        "--loss", type=float, required=True, help="The loss to reach, per token, without label smoothing."
    )
    parser.add_argument("--every", type=int, default=100, help="Steps between validations.")
    parser.add_argument("--most-steps", type=int, default=5000, help="Stop after this many steps.")
    parser.add_argument("--set", nargs="*", default=[], help="Settings, as for transduce train.")
    parser.add_argument("--one-batch", action="store_true", help="Join the batches of a step for the plain loop.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepared = Prepared(options.prepared)
    n_entries = len(prepared.subwords)
    config = with_model(PRESETS[options.size](), source_vocab_size=n_entries, target_vocab_size=n_entries)
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
    provenance = passport(config, options.device)  # before the number of threads changes, which it contains
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(Path(folder), config, prepared, options.device)
        result["ours"] = train_until(options, trainer, trainer.take_step, lambda: our_validation_loss(trainer))
        trainer.begin(config, trainer.group)  # releases Adam's moments
        torch.set_num_threads(trainer.choices.n_threads)  # on a CPU, our passes use fewer threads per operation
        plain = PlainLoop(trainer, options.one_batch)
        result["nn.Transformer"] = train_until(options, trainer, plain.take_step, plain.validation_loss)
    ours, theirs = (result[name]["seconds"] for name in ("ours", "nn.Transformer"))
    result["ratio"] = theirs / ours if ours and theirs else None
    if options.out:
        write_result(options.out, result | provenance)
    print(f"ratio {result['ratio']}", flush=True)


def trainer_for(folder: Path, config: RunConfig, prepared: Prepared, device: str) -> Trainer:
    choices = choose(config, device, 1, longest_sentence(prepared), deterministic=False)
    # For both programs: otherwise cuDNN plans each new shape, and the plain loop is several times slower.
    choices.configure_process()
    return make_trainer(folder, None, config, choices, prepared, lambda event: None)


def our_validation_loss(trainer: Trainer) -> float:
    score = trainer.validation_loss()
    assert score is not None, NO_VALIDATION
    return score.loss


def train_until(
    options: argparse.Namespace,
    trainer: Trainer,
    take_step: Callable[[int, Share], None],
    validation_loss: Callable[[], float],
) -> dict[str, Any]:
    """Take steps until the loss is reached. The time of steps ends when the device has finished them."""
    shares, seconds, curve = prefetch(trainer.shares(0)), 0.0, []
    for first in range(1, options.most_steps + 1, options.every):
        began = time.perf_counter()
        for step in range(first, first + options.every):
            take_step(step, next(shares))
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - began
        curve.append([step, seconds, validation_loss()])
        print(curve[-1], flush=True)
        if curve[-1][2] <= options.loss:
            break
    shares.close()  # type: ignore[attr-defined]  # a generator has it
    is_reached = curve[-1][2] <= options.loss
    return {"seconds": seconds if is_reached else None, "steps": curve[-1][0], "curve": curve}


def joined(batches: Sequence[Tensors], pad_id: int) -> Tensors:
    """One batch of all rows, padded to the longest."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        longest = max(ids.shape[1] for ids in parts)
        return torch.cat([F.pad(ids, (0, longest - ids.shape[1]), value=pad_id) for ids in parts])

    sources, targets_in, targets_out = zip(*batches, strict=True)
    return join(sources), join(targets_in), join(targets_out)


class PlainLoop:
    """It uses the trainer's batches, settings, device and precision, but has its own model and optimiser."""

    def __init__(self, trainer: Trainer, one_batch: bool) -> None:
        self.one_batch = one_batch
        self.trainer, self.config, self.device = trainer, trainer.config, trainer.group.device
        torch.backends.mha.set_fastpath_enabled(False)  # on a CPU, it fails in validation under autocast (torch 2.13)
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
        settings, pad_id = self.config.train, self.config.model.pad_id
        self.optimiser.zero_grad()
        for batch in [joined(share.batches, pad_id)] if self.one_batch else share.batches:
            pinned = [ids.pin_memory() if self.device.type == "cuda" else ids for ids in batch]
            source_BS, target_in_BT, target_out_BT = (ids.to(self.device, non_blocking=True) for ids in pinned)
            with self.trainer.choices.autocast():
                logits_BTV = self.model(source_BS, target_in_BT)
            loss_sum, _ = loss(logits_BTV, target_out_BT, settings.label_smoothing, pad_id)
            (loss_sum / share.n_target_tokens).backward()
        if settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        rate = settings.rate_factor * learning_rate(step, self.config.model.d_model, settings.warmup_steps)
        self.optimiser.param_groups[0]["lr"] = rate
        self.optimiser.step()

    @torch.no_grad()
    def validation_loss(self) -> float:
        layout = self.trainer.validation.layout
        assert layout is not None, NO_VALIDATION
        total, n_tokens = 0.0, 0
        self.model.eval()
        order = steps(self.trainer.validation.examples, layout, self.config.model)
        for _, step in zip(range(layout.n_steps), order, strict=False):
            for batch in step.batches:
                source_BS, target_in_BT, target_out_BT = (torch.from_numpy(ids).to(self.device) for ids in batch[:3])
                with self.trainer.choices.autocast():
                    logits_BTV = self.model(source_BS, target_in_BT)
                loss_sum, _ = loss(logits_BTV, target_out_BT, 0.0, self.config.model.pad_id)
                total, n_tokens = total + float(loss_sum), n_tokens + batch.n_target_tokens
        self.model.train()
        return total / n_tokens


if __name__ == "__main__":
    main()
