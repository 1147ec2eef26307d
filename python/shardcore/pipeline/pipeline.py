"""``Pipeline``: a model in stages over the ranks of the mesh's ``pp`` axis, trained by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcore import comm, plan
from shardcore.errors import ConfigError, StateError
from shardcore.mesh import Mesh
from shardcore.pipeline import data as micro_batches
from shardcore.pipeline.auto import AutoReport, AutoSchedule, AutoTuner
from shardcore.pipeline.executor import Executor, Step
from shardcore.pipeline.gradients import Gradients
from shardcore.pipeline.layers import Builder, BuiltLayer, Layer, Partition, as_layers, boundaries_of, find_ties
from shardcore.pipeline.model_part import ModelPart
from shardcore.pipeline.placement import Placement
from shardcore.pipeline.profile import measure_layers
from shardcore.pipeline.randomness import RandomKey, restored_randomness
from shardcore.pipeline.recompute import Recompute, run_layers
from shardcore.pipeline.split import WeightGradients
from shardcore.pipeline.trace import Span
from shardcore.pipeline.trace import save as save_trace
from shardcore.pipeline.transformers_model import is_transformers_model, loss_of
from shardcore.pipeline.weights import Normalize, loss_weights
from shardcore.protocols import attach_pipeline, find_root

_REDUCE = {"once": "once", "per_microbatch": "per-microbatch"}


class Pipeline(nn.Module):
    """This rank's stages of a model, and the program that trains them. Every rank makes the same one.

    Layers keep their names, so ``state_dict()`` holds this rank's part of the whole model's.

    Args:
        model: an ``nn.Sequential``; a list of modules, functions and :class:`LayerSpec` in which each layer takes what
            the one before returns, and of whose specs a rank builds only its own; or a Hugging Face model, whose
            micro-batches are its keyword arguments.
        mesh: its ``pp`` axis is the pipeline.
        schedule: a name of :func:`shardcore.plan.pipeline_schedule`, a schedule that is not lowered, or ``"auto"``: one
            that is made for what the first steps cost; :class:`AutoSchedule` says how.
        num_microbatches: micro-batches of a step, on each data-parallel rank.
        num_chunks: stages on each rank; None is the schedule's own number.
        loss_fn: ``(output, labels) -> scalar``, the mean over the micro-batch; None if the last layer returns the loss.
        partition: ``"profile"``: by the time that each layer takes; else see
            :func:`shardcore.pipeline.layers.boundaries_of`.
        reduce: ``"once"`` a step, behind a stage's last backward, or ``"per_microbatch"``, which needs only one bucket
            of gradients at stages 2 and 3, at that many times the traffic.
        normalize: ``"microbatches"``: each counts the same; ``"tokens"``: as many times as it has labels other than
            -100, over all data-parallel ranks; or a function of the labels that gives a micro-batch's weight.
        recompute: which layers compute their activations again in backward instead of keeping them.
        example: the inputs of a micro-batch, on every rank, for ``partition="profile"``, which runs the layers on it.
        seed: what layers built from specs, and random numbers in training, are drawn from (``docs/pipeline.md``).

    Raises:
        ConfigError, PlanError: on every rank; what cannot be cut, placed or scheduled.
        RankMismatchError: ranks made different pipelines.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        *,
        schedule: str | plan.PipelineSchedule | AutoSchedule = "1f1b",
        num_microbatches: int = 1,
        num_chunks: int | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        partition: Partition = "parameters",
        reduce: str = "once",
        normalize: Normalize = "microbatches",
        recompute: Recompute | None = None,
        seed: int = 0,
        example: Any = None,
    ) -> None:
        super().__init__()
        self._mesh, self._normalize, self.seed = mesh, normalize, seed
        self._loss_fn = loss_of(model) if loss_fn is None and is_transformers_model(model) else loss_fn
        _check_arguments(reduce, loss_fn)
        self._reduce = _REDUCE[reduce]
        self._recompute = recompute or Recompute()
        self._tuner = _tuner(schedule, mesh, num_chunks)
        self._schedule_of = self._tuner.schedule if self._tuner else _schedules(schedule, mesh["pp"].size, num_chunks)
        self.num_microbatches = num_microbatches
        self.num_steps = 0
        """Steps taken; part of what random numbers are drawn from, so set it when you resume."""
        self.layer_seconds: list[float] | None = None
        """Of every layer of the model, where the partition was made for them."""
        layers = as_layers(model, mesh.device)
        first = self._schedule_of(num_microbatches)
        self._placement = self._place(first, layers, partition, example)
        self._placement.check_agreement()
        self._check_classes(self._recompute.classes)
        # Blocks are units of sharding also where a rank has one of them, which nothing here repeats.
        self._no_split_modules = self._placement.repeated_classes
        self._stages = self._build(Builder(layers, seed))
        self.to(mesh.device)
        self._placement.check_every_rank_trains(list(self.parameters()))
        built = {i: b for stage in self._stages.values() for i, b in stage}
        self._shared = self._placement.shared_weights(built)
        self._channels = comm.channels(mesh, "pp", self._placement.edges())
        self._weight_gradients = WeightGradients(mesh.device)
        if self._tuner is not None or _splits_backward(first):
            self._weight_gradients.split(self.children())
        self._executors: dict[tuple[str, int, int | None], Executor] = {}
        self._gradients: Gradients | None = None
        self._spans: list[Span] | None = None
        attach_pipeline(self)

    @property
    def mesh(self) -> Mesh:
        """The mesh that it was made for."""
        return self._mesh

    @property
    def placement(self) -> Placement:
        """Which rank runs what."""
        return self._placement

    @property
    def pipeline_axis(self) -> Any:
        """The axis over which the stages lie."""
        return self._mesh["pp"]

    def tied_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of this rank that other stages hold, too, by names that are the same on all ranks."""
        return {weight.name: weight.param for weight in self._shared}

    def counts_in_norm(self, param: nn.Parameter) -> bool:
        """Whether this rank counts the parameter in the global gradient norm: one rank does for each parameter."""
        return all(weight.axis.rank == 0 for weight in self._shared if weight.param is param)

    def recompute_by(
        self, function: Callable[..., Any], interval: int | None = None, classes: Sequence[str] | None = None
    ) -> None:
        """Let groups of layers be recomputed by ``function(run, *args)``, which calls ``run`` now and in backward.

        Args:
            interval: layers of a stage in a group; None keeps what the pipeline was made with, or is each by itself.
            classes: only groups whose layers are all of these; None keeps what the pipeline was made with.

        Raises:
            ConfigError: no layer of the pipeline, on any rank, is of one of these classes.
        """
        self._check_classes(classes)
        self._recompute = replace(
            self._recompute,
            function=function,
            interval=interval or self._recompute.interval or 1,
            classes=classes or self._recompute.classes,
        )

    def explain(self) -> str:
        """Which layers run in which stage, on which rank, and what part of the weights has a gradient of its own."""
        split, whole = self._weight_gradients.num_split, self._weight_gradients.num_whole
        lines = [self._placement.explain()]
        if self.layer_seconds is not None:
            lines.append("ms of layers: " + ", ".join(f"{1e3 * each:.3f}" for each in self.layer_seconds))
        if split + whole:
            lines.append(f"backward split for {split} of {split + whole} trainable elements of this rank")
        if self.auto_report is not None:
            lines.append(self.auto_report.explain())
        return "\n".join(lines)

    @property
    def auto_report(self) -> AutoReport | None:
        """What ``schedule="auto"`` found for steps of ``num_microbatches``; None before the switch, and elsewhere."""
        return None if self._tuner is None else self._tuner.report(self.num_microbatches)

    def forward(self, stage: int, value: Any, skips: dict[str, Any], key: RandomKey | None) -> Any:
        """Forward of one stage of this rank; called by the program. Returns the output and what is set aside."""
        layers = [layer for _, layer in self._stages[stage]]
        return run_layers(layers, value, skips, key, self._mesh.device, self._recompute)

    def loss(self, output: Any, labels: Any) -> torch.Tensor:
        """The mean loss of a micro-batch, from what the last layer returned."""
        loss = output if self._loss_fn is None else self._loss_fn(output, labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise StateError(f"the pipeline's loss must be a scalar tensor, got {type(loss).__name__}: {loss!r:.80}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise StateError("the pipeline's loss does not depend on any trainable parameter")
        return loss

    def train_batch(
        self, data_iter: Iterator[Any] | None, optimizer: Any = None, scheduler: Any = None
    ) -> torch.Tensor:
        """Forward and backward of ``num_microbatches`` micro-batches; with an optimizer also its step. Collective over
        the mesh.

        Args:
            data_iter: yields (inputs, labels); inputs are used by first, labels by last stages. Ranks that run
                neither may pass None.
            optimizer: stepped and cleared; without one, gradients add up until its owner steps it.
            scheduler: stepped if the optimizer's step was applied.

        Returns:
            The mean loss over micro-batches and data-parallel ranks, fp32, on every rank.

        Raises:
            StateError: on every rank, if an iterator ends early on any; no micro-batch was used then.
            RankFailedError: another rank failed.
        """
        with self._reporting():
            if self._tuner is not None and self._tuner.switch_if_due(self._channels, self.num_microbatches):
                self._executors = {key: each for key, each in self._executors.items() if key[0] != "train"}
            loss, _ = self._run("train_batch", data_iter, self.num_microbatches, trains=True)
            self.num_steps += 1
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None and getattr(optimizer, "step_was_applied", True):
                    scheduler.step()
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        num_microbatches: int | None = None,
        return_outputs: bool = False,
        compute_loss: bool = True,
    ) -> Any:
        """The mean loss of some micro-batches in evaluation mode, without gradients. Collective over the mesh.

        Args:
            data_iter: as in :meth:`train_batch`.
            num_microbatches: any number; None means as many as in training.
            return_outputs: return ``(loss, outputs)``; the outputs of the last stage are a list by micro-batch on ranks
                that run it, None on others.
            compute_loss: False computes outputs only; the loss is 0 then.
        """
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            with self._reporting():
                count = num_microbatches or self.num_microbatches
                loss, outputs = self._run("eval_batch", data_iter, count, False, return_outputs, compute_loss)
        finally:
            for module, mode in modes.items():
                module.training = mode
        return (loss, outputs) if return_outputs else loss

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Note when each action of the steps inside begins and ends, for every rank of this pipeline, and write it to
        ``path`` on its first rank, for https://ui.perfetto.dev. Collective over the pipeline's axis.
        """
        spans: list[Span] = []
        self._spans = spans
        try:
            yield
        finally:
            self._spans = None
        save_trace(path, spans, self._mesh["pp"])

    def _run(
        self,
        name: str,
        data_iter: Iterator[Any] | None,
        m: int,
        trains: bool,
        keeps_outputs: bool = False,
        computes_loss: bool = True,
    ) -> tuple[torch.Tensor, list[Any] | None]:
        mesh, placement = self._mesh, self._placement
        for channel in self._channels.values():
            channel.check()
        batches: list[micro_batches.Batch] = []
        if placement.runs_an_end:
            drawn = micro_batches.draw(data_iter, m, f"{name} on rank {mesh.rank}")
            batches = [micro_batches.to_device(batch, mesh.device) for batch in drawn]
        weights = loss_weights(self._normalize, [labels for _, labels in batches])
        num_drawn = len(batches) if placement.runs_an_end else m
        sums = micro_batches.agree(mesh, f"{name} of {m} micro-batches", num_drawn, m, weights)
        shares = (
            [1 / m] * m if sums is None else [w * mesh.data_world / float(sums.sum()) for w in weights or [0.0] * m]
        )
        step = Step(
            inputs=[inputs for inputs, _ in batches],
            labels=[labels for _, labels in batches],
            factors=[share * self._loss_scale() for share in shares],
            keys=self._keys(m) if trains else [None] * m,
            trains=trains,
            keeps_outputs=keeps_outputs,
            computes_loss=computes_loss,
        )
        with self._tuner.timed_step() if trains and self._tuner is not None else nullcontext():
            self._execute(step, m)
            loss = self._mean_loss(step, shares)
        return loss, [step.outputs[i] for i in sorted(step.outputs)] if step.outputs else None

    def _execute(self, step: Step, m: int) -> None:
        executor = self._executor("train" if step.trains else "eval", m)
        root = find_root(self)
        if self._gradients is None or self._gradients.root is not root:
            self._gradients = Gradients(root, self._parameters_of_stages(), self._shared)
        gradients = self._gradients
        meter = self._tuner.meter() if step.trains and self._tuner is not None else None
        gradients.begin()
        try:
            with restored_randomness(self._mesh.device):
                executor.run(step, gradients, self._spans, meter)
        except BaseException:
            for channel in self._channels.values():
                channel.abandon()
            raise
        finally:
            gradients.end()

    def _mean_loss(self, step: Step, shares: list[float]) -> torch.Tensor:
        total = torch.zeros((), device=self._mesh.device)
        for i, loss in sorted(step.losses.items()):
            total += loss.float().reshape(()) * shares[i]
        comm.sum_over_ranks(total, self._mesh["pp"], "loss")
        return comm.sum_over_ranks(total, self._mesh["dp"], "loss") / self._mesh.data_world

    def _keys(self, m: int) -> list[RandomKey | None]:
        world, rank = self._mesh.data_world, self._mesh.data_rank
        return [RandomKey(self.seed, self.num_steps, i * world + rank) for i in range(m)]

    def _loss_scale(self) -> float:
        root = find_root(self)
        return 1.0 if root is None else float(root.output_scale * root.accumulation)

    def _executor(self, kind: str, m: int) -> Executor:
        root = find_root(self)
        if root is None and self._mesh.data_world > 1 and kind == "train":
            raise StateError(
                f"the mesh has {self._mesh.data_world} data-parallel ranks, but the Pipeline is not sharded: call "
                "shardcore.shard(pipe, mesh, stage=...) first (stage 0 replicates)"
            )
        stage = None if root is None else root.policy.stage
        key = (kind, m, stage)
        if key not in self._executors:
            self._executors[key] = Executor(
                self._lower(kind, m, stage),
                self._placement.position,
                self._placement.ranks,
                chain=self,
                channels=self._channels,
                weight_gradients=self._weight_gradients,
            )
        return self._executors[key]

    def _lower(self, kind: str, m: int, stage: int | None) -> plan.PipelineSchedule:
        first = self._placement.schedule
        if kind == "eval":
            return plan.evaluation_schedule(first.placement, m, num_chains=first.num_chains).lower()
        lowered = self._schedule_of(m).lower(
            zero_stage=stage,
            reduce=self._reduce if stage in (2, 3) else "once",
            tied=self._placement.tied_stages,
        )
        lowered.check(comm="directed")
        return lowered

    def _place(
        self, schedule: plan.PipelineSchedule, layers: Sequence[Layer], partition: Partition, example: Any
    ) -> Placement:
        """Cut the layers into the schedule's stages, by measured times where these are asked for."""
        per_chain = schedule.num_stages // schedule.num_chains
        if partition == "profile":
            if example is None:
                raise ConfigError(
                    "Pipeline(partition='profile') runs the layers to measure them: pass example=<the inputs of a "
                    "micro-batch> on every rank"
                )
            with self._reporting():
                self.layer_seconds = measure_layers(layers, example, self._mesh, self._recompute, self.seed)
            partition = plan.partition_layers(self.layer_seconds, per_chain)
        boundaries = boundaries_of(layers, partition, per_chain)
        return Placement(self._mesh, schedule, layers, boundaries, find_ties(layers))

    def _parameters_of_stages(self) -> dict[int, list[nn.Parameter]]:
        return {
            stage: [p for _, b in layers if isinstance(b.module, nn.Module) for p in b.module.parameters()]
            for stage, layers in self._stages.items()
        }

    def _check_classes(self, classes: Sequence[str] | None) -> None:
        unknown = sorted(set(classes or ()) - set(self._placement.classes))
        if unknown:
            raise ConfigError(
                f"recomputation of layers of class {', '.join(unknown)}: the pipeline has none; its layers are of "
                f"{', '.join(self._placement.classes)}"
            )

    def _build(self, builder: Builder) -> dict[int, list[tuple[int, BuiltLayer]]]:
        """The layers of this rank's stages, registered under their names."""
        stages = {
            stage: [(i, builder.build(i)) for i in self._placement.layers_of(stage)] for stage in self._placement.stages
        }
        for layers in stages.values():
            for _, layer in layers:
                if isinstance(layer.module, ModelPart):
                    self._modules.update(layer.module._modules)
                elif isinstance(layer.module, nn.Module):
                    self._modules[layer.name] = layer.module
        return stages

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """What this rank raises inside ends the others, too."""
        try:
            yield
        except Exception as error:
            comm.report_failure(error)
            raise


def _splits_backward(schedule: plan.PipelineSchedule) -> bool:
    return any(action.kind == "W" for rank in range(schedule.num_ranks) for action in schedule.program(rank))


def _tuner(schedule: Any, mesh: Mesh, num_chunks: int | None) -> AutoTuner | None:
    """What makes the schedules where they are to be made for measured costs."""
    if isinstance(schedule, str) and schedule == "auto":
        schedule = AutoSchedule()
    if not isinstance(schedule, AutoSchedule):
        return None
    if num_chunks not in (None, 1):
        raise ConfigError(
            f"Pipeline(schedule='auto', num_chunks={num_chunks}): each rank gets one stage; leave num_chunks out"
        )
    return AutoTuner(schedule, mesh)


def _check_arguments(reduce: str, loss_fn: Callable[..., Any] | None) -> None:
    if reduce not in _REDUCE:
        raise ConfigError(f"Pipeline(reduce={reduce!r}): expected 'once' or 'per_microbatch'")
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise ConfigError("Pipeline(loss_fn=...): it has parameters; make it the last layer and leave loss_fn out")


def _schedules(schedule: Any, num_ranks: int, num_chunks: int | None) -> Callable[[int], plan.PipelineSchedule]:
    """The schedule for a number of micro-batches."""

    def made(num_microbatches: int) -> plan.PipelineSchedule:
        if isinstance(schedule, str):
            found = plan.pipeline_schedule(schedule, num_ranks, num_microbatches, num_chunks)
        elif schedule.num_ranks != num_ranks or schedule.num_microbatches != num_microbatches:
            raise ConfigError(
                f"Pipeline(schedule={schedule!r}): it is for {schedule.num_ranks} ranks and "
                f"{schedule.num_microbatches} micro-batches; the mesh has pp={num_ranks}, and num_microbatches is "
                f"{num_microbatches}"
            )
        else:
            found = schedule
        if found.num_slices > 1:
            raise ConfigError(
                f"Pipeline(schedule={found.name!r}): sequence slices need layers that carry keys and values from slice "
                "to slice, which is not supported; use '1f1b' or another schedule of whole sequences"
            )
        return found

    return made
