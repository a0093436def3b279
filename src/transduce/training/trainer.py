"""The training loop, for one process or many. It may be killed at any moment and goes on with the same bits.

Nothing random is carried from step to step: the batches of a step and its dropout follow from the seed and the number
of the step. So a checkpoint is weights, Adam's moments and a few counters.
"""

# Axes: B sentences, S source positions, T target positions, V vocabulary.

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transduce.config import RunConfig
from transduce.data.batches import Batch, Examples, prefetch, steps
from transduce.data.plan import Layout, make_layout
from transduce.errors import TransduceError
from transduce.model import Transformer
from transduce.model_folder.format import average, checkpoints, fault_of, load_checkpoint, save_checkpoint, step_of
from transduce.training.choices import Choices
from transduce.training.distributed import Group
from transduce.training.passes.written import GraphPasses, ThreadPasses, written_passes
from transduce.training.recipe import adam, learning_rate, loss, model_loss

Tell = Callable[[dict[str, Any]], None]
"""Called with each event: its name under "event", its step, and what there is to say."""
Tensors = tuple[Tensor, Tensor, Tensor]
"""source_BS, target_in_BT, target_out_BT."""

LOG_EVERY = 20
DISK_BYTES_PER_SECOND = 3e8
"""A guess at what a checkpoint takes, which a forecast needs."""
CALIBRATE_JUDGED = 32
"""Validation pairs that are translated to see how long that takes."""
KEEP_LAST = 2
"""Checkpoints with moments: the newest, and one more in case it is damaged."""


class TrainingError(TransduceError):
    """The run cannot go on. What it saved is still there."""


class Stopped(TransduceError):
    """As it was asked to."""


@dataclass
class State:
    """What a checkpoint holds beside weights and moments."""

    step: int = 0
    n_tokens: int = 0
    """Target tokens, end marks counted."""
    seconds: float = 0.0
    micro_limit: int | None = None
    """Positions, padding counted, that one pass may have since one ran out of memory."""
    losses: dict[int, float] = field(default_factory=dict)
    """Validation loss by step."""

    def best_step(self) -> int | None:
        return min(self.losses, key=lambda step: self.losses[step], default=None)

    def n_since_best(self) -> int:
        best = self.best_step()
        return sum(step > best for step in self.losses) if best is not None else 0

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> State:
        return cls(**{**values, "losses": {int(step): value for step, value in values["losses"].items()}})


class Valid(NamedTuple):
    loss: float
    """Per token, without smoothing."""
    accuracy: float
    """How often the most likely token is the right one, given the right ones before it."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


class Speed(NamedTuple):
    """What a run will take, as measured before it begins."""

    seconds_per_step: float
    seconds_per_validation: float
    """Of the loss alone."""
    seconds_per_translation: float
    """Of a validation pair, by a model that has learnt nothing: later they are shorter."""
    seconds_per_save: float
    tokens_per_second: float
    memory_bytes: int


class Share(NamedTuple):
    """A rank's share of a step as tensors; see `StepBatches`."""

    numbers: list[int]
    batches: list[Tensors]
    n_target_tokens: int


class Trainer:
    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        choices: Choices,
        train: Examples,
        valid: Examples,
        group: Group,
        tell: Tell,
        first_weights: Mapping[str, Tensor] | None = None,
        describe: Callable[[list[list[list[int]]]], Any] = lambda pairs: pairs,
        judge: Callable[[Transformer, int], dict[str, Any]] = lambda model, n: {},
    ) -> None:
        """`describe` makes of pairs of ids what a person can read; `judge` says how well so many are translated."""
        self.folder, self.config, self.choices, self.group, self.tell = folder, config, choices, group, tell
        self.examples, self.valid_examples, self.first_weights = train, valid, first_weights
        self.describe, self._judge = describe, judge
        self.is_asked_to_stop = False
        choices.apply()
        self.model = Transformer(config.model).to(group.device)
        self.parameters = list(self.model.parameters())
        self.layout = self._layout_of(train, config.train.seed)
        self.valid_layout = self._layout_of(valid, seed=0) if len(valid) else None
        self.passes = self._written_passes() if choices.way == "written" else None
        self.begin(config, group)

    def _layout_of(self, examples: Examples, seed: int) -> Layout:
        settings, micro_tokens = self.config.data, self.choices.micro_tokens
        return make_layout(
            *examples.lengths(),
            batch_tokens=settings.batch_tokens,
            n_shapes=settings.n_shapes,
            seed=seed,
            micro_tokens=micro_tokens,
        )

    def _written_passes(self) -> GraphPasses | ThreadPasses:
        return written_passes(
            self.model,
            int(self.layout.shape_K2.max()),
            torch.bfloat16 if self.choices.dtype == "bfloat16" else torch.float32,
            self.choices.micro_tokens,
            self.config.train.label_smoothing,
            self.choices.n_threads,
        )

    def begin(self, config: RunConfig, group: Group) -> None:
        """Everything as it is before the first step. What model and layout were made from may not differ."""
        assert (config.model, config.data) == (self.config.model, self.config.data)
        self.config, self.group = config, group
        torch.manual_seed(config.train.seed)
        weights = self.first_weights or Transformer(config.model).weights()  # on the CPU: it begins alike everywhere
        self.model.load_weights(weights)
        self.optimiser = adam(self.parameters, config.train)
        self.state, self.window = State(), Window(group)

    def calibrate(self, seconds: float, n_ranks: int = 1) -> Speed:
        """Takes real steps for so long, after two to warm up, validates once, and begins anew.

        Of a run on several ranks it takes the first one's share, alone.
        """
        shares = prefetch(self.shares(0, 0, n_ranks))

        def take_steps(seconds: float, at_least: int) -> tuple[int, int, float]:
            n_steps, n_tokens, began = 0, 0, time.perf_counter()
            while n_steps < at_least or time.perf_counter() - began < seconds:
                share = next(shares)
                n_before, since = self._n_recorded(), time.perf_counter()
                self.take_step(n_steps + 1, share)
                self.window.loss.item()  # waits for the device
                if self._n_recorded() > n_before:  # once for a shape, not once for a step
                    began += time.perf_counter() - since
                    continue
                n_steps, n_tokens = n_steps + 1, n_tokens + share.n_target_tokens
            return n_steps, n_tokens, time.perf_counter() - began

        take_steps(0.0, 2)
        n_steps, n_tokens, spent = take_steps(seconds, 3)
        shares.close()  # type: ignore[attr-defined]  # a generator has it
        began = time.perf_counter()
        if len(self.valid_examples):
            self.validation_loss()
        seconds_per_validation, began = time.perf_counter() - began, time.perf_counter()
        n_judged = min(CALIBRATE_JUDGED, self.config.train.valid_translations)
        if len(self.valid_examples) and n_judged:
            self.judge(n_judged)
        speed = Speed(
            seconds_per_step=spent / n_steps,
            seconds_per_validation=seconds_per_validation,
            seconds_per_translation=(time.perf_counter() - began) / max(1, n_judged),
            seconds_per_save=16 * sum(p.numel() for p in self.parameters) / DISK_BYTES_PER_SECOND,
            tokens_per_second=n_tokens / spent,
            memory_bytes=self.memory_bytes(),
        )
        self.begin(self.config, self.group)
        return speed

    def _n_recorded(self) -> int:
        return len(self.passes.recorded) if isinstance(self.passes, GraphPasses) else 0

    def fits(self) -> int:
        """Positions that a pass may have: those of the layout, or fewer where its largest runs out of memory."""
        M = self.layout.n_rows_M * self.layout.shape_K2[self.layout.shape_M].max(axis=1)
        widest = self.layout.shape_K2[self.layout.shape_M].max(axis=1)
        for m in {int(M.argmax()), int(widest.argmax())}:
            n_source, n_target = self.layout.shape_K2[self.layout.shape_M[m]]
            shape = int(self.layout.n_rows_M[m]), int(n_source)
            ids = (
                torch.full(shape, self.config.model.eos_id),
                torch.full((shape[0], int(n_target)), self.config.model.eos_id),
            )
            share = Share([0], [(ids[0], ids[1], ids[1])], shape[0] * int(n_target))
            self._gradients(1, share)
        limit = self.state.micro_limit
        self.begin(self.config, self.group)
        return self.choices.micro_tokens if limit is None else limit

    def memory_bytes(self) -> int:
        """At most so far, of the GPU; of the process now, where there is none."""
        if self.group.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated())
        try:
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        except OSError:
            return 0

    # The run.

    def run(self) -> None:
        """From the newest whole checkpoint, or the start, to the last step, or to where patience ends it."""
        self.resume()
        settings, checkpoint_steps = self.config.train, self.config.train.checkpoint_steps
        assert checkpoint_steps is not None, "settled before the first step"
        began = time.monotonic() - self.state.seconds
        shares = prefetch(self.shares(self.state.step, self.group.rank, self.group.n_ranks))
        while self.state.step < settings.max_steps and not self._is_out_of_patience():
            share = next(shares)
            step = self.state.step + 1
            self.take_step(step, share)
            self.state.step = step
            self.state.n_tokens += share.n_target_tokens
            is_milestone = step % checkpoint_steps == 0 or step == settings.max_steps
            if is_milestone or step % min(LOG_EVERY, settings.max_bad_steps) == 0:
                self.state.seconds = time.monotonic() - began
                self._log()
                is_asked_to_stop = self.group.any(self.is_asked_to_stop)
                if is_milestone or is_asked_to_stop:
                    self.save(is_milestone)
                if is_asked_to_stop:
                    raise Stopped(f"stopped after step {step:,}, which is saved: the same command goes on")
            if is_milestone:
                self.validate()
                self.window.since = time.perf_counter()  # tokens per second are those of steps
        shares.close()  # type: ignore[attr-defined]  # a generator has it

    def shares(self, first_step: int, rank: int = 0, n_ranks: int = 1) -> Iterator[Share]:
        """Steps from this one on, counted from 0, as tensors that can travel to the device beside other work."""
        for step in steps(self.examples, self.layout, self.config.model, first_step, rank, n_ranks):
            yield Share(step.numbers, [self._tensors(batch) for batch in step.batches], step.n_target_tokens)

    def _tensors(self, batch: Batch) -> Tensors:
        source_BS, target_in_BT, target_out_BT = (torch.from_numpy(ids) for ids in batch[:3])
        if self.group.device.type == "cuda" and self.passes is None:  # written passes pin one piece of their own
            return source_BS.pin_memory(), target_in_BT.pin_memory(), target_out_BT.pin_memory()
        return source_BS, target_in_BT, target_out_BT

    def _is_out_of_patience(self) -> bool:
        patience = self.config.train.patience
        return patience is not None and self.state.n_since_best() >= patience

    def _log(self) -> None:
        step = self.state.step
        read = self.window.read()
        if read["bad_steps"]:
            self._keep_bad_batch(read["last_bad_step"])
            self.tell({"event": "bad step", "step": read["last_bad_step"], "in_a_row": read["bad_in_a_row"]})
        self.tell(
            {
                "event": "step",
                "step": step,
                "loss": read["loss"],
                "gradient_norm": read["gradient_norm"],
                "learning_rate": self._rate(step),
                "tokens_per_second": read["tokens_per_second"],
                "memory_bytes": self.memory_bytes(),
                "seconds": round(self.state.seconds, 2),
                "epoch": round(step / self.layout.n_steps, 3),
                "seconds_per_step": read["seconds_per_step"],
                "max_steps": self.config.train.max_steps,
            }
        )
        if read["bad_in_a_row"] >= self.config.train.max_bad_steps:
            raise TrainingError(
                f"{read['bad_in_a_row']} steps in a row gave a loss or gradient that is no number, the last at step "
                f"{read['last_bad_step']}: raise train.warmup_steps, set train.clip_norm=1, or look at the pairs in "
                f"{self.folder / BAD}; the weights are those before"
            )

    def _keep_bad_batch(self, step: int) -> None:
        """The pairs of a step, which follow from its number, for people to look at."""
        if not self.group.is_first:
            return
        number, place = divmod(step - 1, self.layout.n_steps)
        rows = [int(row) for micro in self.layout.epoch(number).step(place) for row in micro.rows]
        pairs = [[side.tolist() for side in self.examples.pair(row)] for row in rows]
        path = self.folder / BAD / f"{name_of(step)}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"step": step, "rows": rows, "pairs": self.describe(pairs)}), encoding="utf-8")

    # One step.

    def take_step(self, step: int, share: Share) -> None:
        """Nothing here waits for the device. The first step is 1."""
        loss_sum = self._gradients(step, share)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.group.sum(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        if (clip_norm := self.config.train.clip_norm) is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, clip_norm, norm)
        # Where this is 1, Adam leaves everything as it is, on the device and without our looking.
        is_bad = 1.0 - torch.isfinite(norm).float()
        self.optimiser.found_inf = is_bad  # type: ignore[attr-defined]
        self.optimiser.param_groups[0]["lr"] = self._rate(step)
        with self.choices.all_threads():
            self.optimiser.step()
        self.window.add(step, loss_sum, norm, is_bad, share.n_target_tokens)

    def _rate(self, step: int) -> float:
        settings = self.config.train
        return settings.rate_factor * learning_rate(step, self.config.model.d_model, settings.warmup_steps)

    def _gradients(self, step: int, share: Share) -> Tensor:
        """Fills every gradient and gives the summed loss. Where memory runs out: again, in smaller parts."""
        while True:
            try:
                return self._accumulate(step, share)
            except torch.OutOfMemoryError:
                # Outside of this block the failed pass would be kept alive by the error, and its memory with it.
                pass
            self._lower_limit(step, share)

    def _accumulate(self, step: int, share: Share) -> Tensor:
        for p in self.parameters:  # zeros and not None: a rank with an empty share takes part in the sum as well
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.optimiser.zero_grad(set_to_none=False)
        total = torch.zeros((), device=self.group.device)
        for place, parts in self._passes_of(share):
            # Divided once, by the tokens of the whole step, which every rank knows from the plan.
            total += self._add_gradients(parts, (step, *place), 1 / share.n_target_tokens)
        return total

    def _passes_of(self, share: Share) -> Iterator[tuple[tuple[int, int], list[Sequence[Tensor]]]]:
        """What goes through the model at once, after its place in the step: one part of a micro-batch, or as many as
        there is room for."""
        limit = self.state.micro_limit or self.choices.micro_tokens
        first, joined, n_positions = (0, 0), list[Sequence[Tensor]](), 0
        for number, batch in zip(share.numbers, share.batches, strict=True):
            for i, part in enumerate(self._parts(batch)):
                n = len(part[0]) * width_of(part)
                if joined and (n_positions + n > limit or self.passes is None or not self.passes.joins):
                    yield first, joined
                    joined, n_positions = [], 0
                first = first if joined else (number, i)
                joined, n_positions = [*joined, part], n_positions + n
        if joined:
            yield first, joined

    def _add_gradients(self, parts: Sequence[Sequence[Tensor]], place: tuple[int, ...], factor: float) -> Tensor:
        seed = seed_of(self.config.train.seed, *place)
        if self.passes is not None:
            return self.passes.add_gradients(parts, [seed], factor)
        (part,) = parts
        torch.manual_seed(seed)
        loss_sum = self.loss_of(*(ids.to(self.group.device, non_blocking=True) for ids in part))
        (loss_sum * factor).backward()
        return loss_sum.detach()

    def loss_of(self, source_BS: Tensor, target_in_BT: Tensor, target_out_BT: Tensor) -> Tensor:
        # In chunks it is faster on a CPU; a GPU is still to be measured.
        in_chunks = self.group.device.type == "cpu"
        with self.choices.autocast():
            return model_loss(
                self.model,
                source_BS,
                target_in_BT,
                target_out_BT,
                self.config.train.label_smoothing,
                in_chunks=in_chunks,
            )

    def _parts(self, batch: Tensors) -> Iterator[tuple[Tensor, ...]]:
        n_rows, limit = len(batch[0]), self.state.micro_limit
        n_fit = n_rows if limit is None else max(1, limit // width_of(batch))
        for first in range(0, n_rows, n_fit):
            yield tuple(ids[first : first + n_fit] for ids in batch)

    def _lower_limit(self, step: int, share: Share) -> None:
        widths = [width_of(batch) for batch in share.batches]
        largest = max(sum(len(part[0]) * width_of(part) for part in parts) for _, parts in self._passes_of(share))
        if largest <= max(widths):
            raise TrainingError(
                f"one pair of {max(widths)} tokens does not fit into memory: choose a smaller --size, or prepare the "
                "text again with a lower data.max_characters"
            )
        self.state.micro_limit = largest // 2
        for p in self.parameters:
            p.grad = None
        if self.passes is not None:
            self.passes.forget()
        if self.group.device.type == "cuda":
            torch.cuda.empty_cache()
        self.tell({"event": "out of memory", "step": step, "micro_limit": self.state.micro_limit})

    # Validation.

    def validate(self) -> Valid | None:
        """Of the weights as they are; None where there are no validation pairs."""
        if len(self.valid_examples) == 0:
            return None
        valid = self.validation_loss()
        self.state.losses[self.state.step] = valid.loss
        self.tell(
            {
                "event": "valid",
                "step": self.state.step,
                "loss": valid.loss,
                "perplexity": valid.perplexity,
                "accuracy": valid.accuracy,
                "is_best": self.state.best_step() == self.state.step,
                **self._judged(),
            }
        )
        return valid

    def _judged(self) -> dict[str, Any]:
        n = self.config.train.valid_translations
        return self.judge(n) if n and len(self.valid_examples) else {}

    def judge(self, n: int) -> dict[str, Any]:
        """By real translations, of the first rank alone: the others wait for it at the next step."""
        if not self.group.is_first:
            return {}
        self.model.eval()
        # On a CPU the translator says itself in which precision it works.
        autocast = self.choices.autocast() if self.group.device.type == "cuda" else contextlib.nullcontext()
        with autocast, self.choices.all_threads():
            found = self._judge(self.model, n)
        self.model.train()
        return found

    def validation_loss(self) -> Valid:
        with self.choices.all_threads(), torch.no_grad():
            return self._validation_loss()

    def _validation_loss(self) -> Valid:
        pad_id, layout = self.config.model.pad_id, self.valid_layout
        assert layout is not None, "there are validation pairs"
        total_3 = torch.zeros(3, dtype=torch.float64, device=self.group.device)
        self.model.eval()
        order = steps(self.valid_examples, layout, self.config.model, 0, self.group.rank, self.group.n_ranks)
        for _, step in zip(range(layout.n_steps), order, strict=False):
            for batch in step.batches:
                for part in self._parts(self._tensors(batch)):
                    source_BS, target_in_BT, target_out_BT = (ids.to(self.group.device) for ids in part)
                    with self.choices.autocast():
                        logits_BTV = self.model(source_BS, target_in_BT).logits_BTV
                    loss_sum, n_tokens = loss(logits_BTV, target_out_BT, 0.0, pad_id)
                    is_right_BT = (logits_BTV.argmax(-1) == target_out_BT) & (target_out_BT != pad_id)
                    total_3 += torch.stack([loss_sum.double(), is_right_BT.sum().double(), n_tokens.double()])
        self.model.train()
        self.group.sum([total_3])
        loss_sum, n_right, n_tokens = total_3.tolist()
        return Valid(loss_sum / n_tokens, n_right / n_tokens)

    # What is written.

    def save(self, is_milestone: bool = False) -> None:
        """A checkpoint; at a milestone also the weights alone, to be averaged, which are kept for longer."""
        step = self.state.step
        if self.group.is_first:
            weights, state = self.model.weights(), asdict(self.state)
            if is_milestone:
                save_checkpoint(self.folder / SNAPSHOTS / name_of(step), weights, {}, {"step": step})
            save_checkpoint(self.folder / CHECKPOINTS / name_of(step), weights, self._moments(), state)
            for old in checkpoints(self.folder / CHECKPOINTS)[KEEP_LAST:]:
                shutil.rmtree(old)
            wanted = self._wanted_snapshots()
            for old in checkpoints(self.folder / SNAPSHOTS):
                if step_of(old) not in wanted:
                    shutil.rmtree(old)
            self.tell({"event": "saved", "step": step})
        self.group.wait()

    def _wanted_snapshots(self) -> set[int]:
        """The last ones, and as many up to the best."""
        known = sorted(step_of(path) for path in checkpoints(self.folder / SNAPSHOTS))
        n, best = self.config.train.average_last, self.state.best_step()
        return {*known[-n:], *[step for step in known if best is not None and step <= best][-n:]}

    def _moments(self) -> dict[str, Tensor]:
        tensors = {}
        for name, p in self.model.named_parameters():
            for key, value in self.optimiser.state[p].items():
                tensors[f"{name}/{key}"] = value
        return tensors

    def resume(self) -> None:
        """Takes up the newest checkpoint that is whole. Later ones, which are not, are removed."""
        for folder in checkpoints(self.folder / CHECKPOINTS):
            if (fault := fault_of(folder)) is not None:
                self.tell({"event": "damaged", "step": step_of(folder), "fault": fault})
                continue
            weights, moments, state = load_checkpoint(folder)
            self.model.load_weights(weights)
            for name, p in self.model.named_parameters():
                self.optimiser.state[p] = {
                    key: moments[f"{name}/{key}"].to(self.group.device) for key in ("step", "exp_avg", "exp_avg_sq")
                }
            self.state = State.from_json(state)
            self.tell({"event": "resumed", "step": self.state.step})
            break
        self.group.wait()
        if self.group.is_first:
            for parent in (CHECKPOINTS, SNAPSHOTS):
                for path in checkpoints(self.folder / parent):
                    if step_of(path) > self.state.step:
                        shutil.rmtree(path)
        if self.state.step and self.state.step not in self.state.losses and self._is_milestone():
            self.validate()  # saved before it was validated, so that a kill in between costs nothing

    def _is_milestone(self) -> bool:
        return (self.folder / SNAPSHOTS / name_of(self.state.step)).exists()

    def finish(self) -> dict[str, Any]:
        """Leaves in the model the best of: the average of the last snapshots, of those up to the best, the best."""
        known = sorted(step_of(path) for path in checkpoints(self.folder / SNAPSHOTS))
        n, best = self.config.train.average_last, self.state.best_step()
        candidates = {"average of the last": known[-n:]}
        if best is not None:
            candidates["average up to the best"] = [step for step in known if step <= best][-n:]
            candidates["best"] = [best]
        found: dict[str, Any] = {}
        for name, chosen in candidates.items():
            if any(chosen == other["steps"] for other in found.values()):
                continue
            self.model.load_weights(self._average(chosen))
            valid = self.validation_loss() if len(self.valid_examples) else None
            found[name] = {
                "steps": chosen,
                "loss": valid and valid.loss,
                "perplexity": valid and valid.perplexity,
                "accuracy": valid and valid.accuracy,
            }
        taken = min(found, key=lambda name: found[name]["loss"] or 0.0)
        self.model.load_weights(self._average(found[taken]["steps"]))
        return {"taken": taken, "candidates": found, **self._judged()}

    def _average(self, chosen: Sequence[int]) -> dict[str, Tensor]:
        return average([self.folder / SNAPSHOTS / name_of(step) for step in chosen])


CHECKPOINTS, SNAPSHOTS, BAD = "checkpoints", "snapshots", "bad-batches"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def width_of(batch: Sequence[Tensor]) -> int:
    return max(batch[0].shape[1], batch[1].shape[1])


def seed_of(seed: int, *place: int) -> int:
    """One stream for each micro-batch of each step, the same whichever rank has it."""
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Window:
    """Sums since the log was last written, on the device: reading them is the one moment we wait for it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.bad_in_a_row = torch.zeros((), device=group.device)
        self.last_bad_step = torch.zeros((), device=group.device)
        self._begin()

    def _begin(self) -> None:
        self.loss = torch.zeros((), device=self.group.device)
        self.norm = torch.zeros((), device=self.group.device)
        self.n_bad = torch.zeros((), device=self.group.device)
        self.n_tokens, self.n_steps, self.since = 0, 0, time.perf_counter()

    def add(self, step: int, loss_sum: Tensor, norm: Tensor, is_bad: Tensor, n_tokens: int) -> None:
        self.loss += loss_sum
        self.norm += norm
        self.n_bad += is_bad
        self.bad_in_a_row = (self.bad_in_a_row + 1) * is_bad
        self.last_bad_step = torch.where(is_bad > 0, float(step), self.last_bad_step)
        self.n_tokens += n_tokens
        self.n_steps += 1

    def read(self) -> dict[str, Any]:
        self.group.sum([self.loss])
        values = torch.stack([self.loss, self.norm, self.n_bad, self.bad_in_a_row, self.last_bad_step]).tolist()
        loss_sum, norm, n_bad, in_a_row, last_bad_step = values
        spent = time.perf_counter() - self.since
        found = {
            "loss": loss_sum / self.n_tokens,
            "gradient_norm": norm / self.n_steps,
            "bad_steps": int(n_bad),
            "bad_in_a_row": int(in_a_row),
            "last_bad_step": int(last_bad_step),
            "tokens_per_second": self.n_tokens / spent,
            "seconds_per_step": spent / self.n_steps,
        }
        self._begin()
        return found
