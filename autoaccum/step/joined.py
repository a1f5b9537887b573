"""Joined windows: modules run on micro-batches, their outputs are put together, and the loss is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from autoaccum.data.randomness import generator_state, get_state, seed_all, set_generator_state, set_state
from autoaccum.distributed.channel import undisturbed
from autoaccum.distributed.group import Group
from autoaccum.distributed.shards import whole_of
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.attempts import Piece
from autoaccum.step.across_ranks import SharedTransaction, Told
from autoaccum.step.gradient import Gradient, Repeat
from autoaccum.step.job import Job
from autoaccum.step.split_calls import Call, Layout, NotRowsError, Ranks, UnknownCallError, cut, joining
from autoaccum.step.terms import Count, Reduction
from autoaccum.step.transaction import Transaction


class JoinableTransaction(Transaction):
    """Adds micro-batches to a window's gradient, or joins them: whichever of the two rules is in force.

    A joined window is a window of one micro-batch to everything around it: one loss, one backward, nothing to weigh.
    """

    unknown: UnknownCallError | None = None
    """A kind of call that was not measured, for which the window has to be run again once it is."""

    was_split = True
    """Whether the last joined window has split any call: none is of a step that is compiled as a whole."""

    _ranks: Ranks | None = None
    """Those that run the other rows of its calls, where there are several."""

    def _begin_anew(self, num_samples: int = 0) -> None:
        super()._begin_anew(num_samples)
        self._cut: list[int] = []

    def add(self, piece: Piece) -> None:
        """Add a micro-batch; a joined window only takes its size, and runs it as a trial where it is one."""
        if self.layout is None:
            super().add(piece)
            return
        if piece.is_trial and piece.size < self._num_samples:
            self._try(piece)
        self._cut.append(piece.size)

    def _try(self, piece: Piece) -> None:
        """Run a micro-batch by itself, of which nothing remains but its time and its memory."""
        before = self._state()
        batch = self.snapshot.read_by(lambda: self._window.micro_batch(piece.start, piece.size))
        try:
            loss = self.plain_forward(batch, piece.size, self._num_samples)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # of a step that wants the whole window: what it took until then is measured
            if is_out_of_memory(error):
                raise
        finally:
            self._computed = None
            self._gradients.drop()
            before.restore()

    def finish(self) -> Gradient | Repeat:
        """Complete the gradient; run the window now where it is joined.

        A module that cannot be split after all is opened, and the window is run again.
        """
        if self.layout is None:
            return super().finish()
        sizes = tuple(self._cut)
        refused = self._run_joined(self.layout, sizes)
        if isinstance(refused, UnknownCallError):
            self.unknown = refused
            return Repeat(sizes=sizes)
        if refused is not None:
            self.layout.heed(refused)
            return Repeat(sizes=sizes)
        if not self._sizes:  # it was not run
            return Repeat(sizes=sizes)
        outcome = super().finish()
        if isinstance(outcome, Repeat):
            return Repeat(sizes=sizes)
        return replace(outcome, sizes=sizes, own=sizes)

    def _run_joined(self, layout: Layout, sizes: tuple[int, ...]) -> NotRowsError | None:
        """Run the window; return what has refused to be split."""
        options: dict[str, Any] = {"generators": self.snapshot.generators(), "ranks": self._ranks}
        try:
            with joining(self._job.model, layout, sizes, self._job.device, **options) as split:
                super().add(Piece(0, self._num_samples))
                self.was_split = split.num_calls > 0
        except NotRowsError as error:
            return error.with_traceback(None)
        return None

    def join(self, layout: Layout) -> None:
        """Join windows from the next attempt on."""
        self.layout = layout
        self.hypothesis = self.settled = None

    def weigh(self) -> None:
        """Weigh micro-batches from the next attempt on."""
        self.layout = None


def why_not_joined(job: Job, *, noise_scale: bool, is_sharded: bool) -> tuple[str, str] | None:
    """Return what stands against joined windows, with what to do; None where nothing does."""
    if is_sharded:
        return "a model sharded by FSDP2", "Its ranks weigh their micro-batches: leave accumulate out."
    if noise_scale:
        return "noise_scale=True", "It is measured on weighted micro-batches: leave one of the two out."
    return None


class LeftError(Exception):
    """Another rank has left the window, which all run again."""


class Refused(NamedTuple):
    """Says that a module cannot be split; a rank sends it instead of whatever message is due."""

    name: str
    """The name of the module."""
    why: str
    is_deep: bool
    """Whether none of the modules inside can be split either."""
    signature: str | None
    """Of a call that was not measured."""

    @staticmethod
    def of(error: NotRowsError, layout: Layout) -> Refused:
        """Return what is told of an error."""
        signature = error.signature if isinstance(error, UnknownCallError) else None
        return Refused(layout.name(error.module), str(error), error.is_deep, signature)

    def error(self, layout: Layout) -> NotRowsError:
        """Return the error, of which all ranks know."""
        module = layout.module_of(self.name)
        found = NotRowsError(module, self.why, is_deep=self.is_deep)
        if self.signature is not None:
            found = UnknownCallError(module, self.signature)
        found.is_agreed = True
        return found


class Begun(NamedTuple):
    """The message with which a rank begins a joined window."""

    sizes: tuple[int, ...]
    """Of its micro-batches."""
    seed: int
    generators: list[Any]
    """The states of those that modules draw from, besides the default ones."""
    batch: Any
    """Its samples, where other ranks cannot read them."""
    has_room: bool
    """Whether joined windows fit."""


class TogetherRanks:
    """The ranks of a joined window, as its calls see them."""

    def __init__(self, group: Group, layout: Layout, device: torch.device, sizes: Sequence[int]) -> None:
        """Set up; ``sizes`` are the samples of each rank."""
        self._group, self._layout, self._device = group, layout, device
        self.size, self.start = group.size, sum(sizes[: group.rank])
        self.num_samples = sum(sizes)
        self._own = self.start, self.start + sizes[group.rank]

    def hear(self, told: Any) -> list[Any]:
        """Tell all ranks something, and return what each has told.

        Raises:
            LeftError: one of them has left the window.
            NotRowsError: one of them has found that a module cannot be split.
        """
        heard = self._group.exchange(told)
        if any(each is None for each in heard):
            raise LeftError
        for each in heard:
            if isinstance(each, Refused):
                raise each.error(self._layout)
        return heard

    @contextmanager
    def drawing(self, call: Call) -> Iterator[None]:
        """Draw, within it, from random numbers of this rank's own: dropout is not to be the same on all of them."""
        seed = int(torch.randint(2**62, ()))
        before, own = call.random_state()
        seed_all(seed + self._group.rank, self._device)
        try:
            yield
            if [str(generator_state(one)) for one, _ in own] != [str(state) for _, state in own]:
                raise NotRowsError(call.module, "it draws from a generator of its own")
        finally:
            set_state(before, self._device)

    def gather(self, call: Call, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of all samples, where each rank passes those of its own.

        Raises:
            NotRowsError: they do not belong together.
        """
        kinds: list[Any] = []
        rows = iter(call.out_rows)
        for one in outputs:
            if not isinstance(one, torch.Tensor):
                kinds.append(str(one) if isinstance(one, (bool, int, float, str)) else type(one).__name__)
                continue
            at = next(rows)
            shape = list(one.shape)
            if at is not None:
                shape[at[0]] = at[1] * self.num_samples
            # What is of no sample is the same on all ranks.
            kinds.append((tuple(shape), one.dtype, at, None if at is not None else one.tolist()))
        # Memory is taken before others are told: between that and the sums they would wait for this rank.
        found = [
            self._laid_out(one, kind[0], kind[2]) if isinstance(one, torch.Tensor) and kind[2] is not None else one
            for one, kind in zip(outputs, kinds, strict=True)
        ]
        # As bytes, of which all ranks but one have zeros: whatever they stand for, their sum is what that one has.
        laid_out = [whole for whole, own in zip(found, outputs, strict=True) if whole is not own]
        buffers = [whole.view(-1).view(torch.uint8) for whole in laid_out]
        heard = self.hear((kinds, call.needs_grad))
        if any(each != kinds for each, _ in heard):
            error = NotRowsError(call.module, "its outputs differ between ranks")
            error.is_agreed = True
            raise error
        call.needs_grad = [any(needs) for needs in zip(*[needs for _, needs in heard], strict=True)]
        self._add_up(buffers)
        return found

    def _laid_out(self, own: torch.Tensor, shape: tuple[int, ...], rows: Any) -> torch.Tensor:
        """Return room for the rows of all ranks, in which this one's are there."""
        low, high = self._own
        whole = own.new_zeros(shape)
        if low < high:
            cut(whole, rows, low, high).copy_(own)
        return whole

    def _add_up(self, buffers: Sequence[torch.Tensor]) -> None:
        with undisturbed():
            for buffer in buffers:
                if buffer.numel():
                    self._group.channel.begin_sum(buffer)()

    def sum(self, tensors: dict[int, torch.Tensor], like: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the mean over ranks of tensors; one that a rank has not is 0 there, and has the shape of ``like``."""
        # Of its own, for what autograd has given may be somebody else's too.
        found = {
            at: tensors[at].clone(memory_format=torch.contiguous_format)
            if at in tensors
            else torch.zeros_like(one, memory_format=torch.contiguous_format)
            for at, one in like.items()
        }
        flat = {at: (torch.view_as_real(one) if one.is_complex() else one).view(-1) for at, one in found.items()}
        there = sorted({at for each in self.hear(sorted(tensors)) for at in each})
        self._add_up([flat[at] for at in there])
        return {at: found[at].div_(self.size) for at in there}


class Gathered:
    """The samples of a window that no rank can read alone, told by all of them."""

    lengths = None

    def __init__(self, batch: Any, num_samples: int) -> None:
        """Take them as one batch."""
        self._batch, self.num_samples = batch, num_samples

    def micro_batch(self, start: int, size: int) -> Any:
        """Return all of them, which is all that is asked for."""
        assert (start, size) == (0, self.num_samples)
        return self._batch


def _moved(batch: Any, device: torch.device | str) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


class JoinedShares(JoinableTransaction, SharedTransaction):
    """A window of which several ranks run a share each, joined or not."""

    has_room = True
    """Whether joined windows fit this rank: if not, it has all ranks weigh their micro-batches."""
    is_refused = False
    """Whether some rank has none."""
    _has_told = False  # whether others wait for what this rank tells next
    _ranks: TogetherRanks | None = None  # of the joined window that runs

    def begin(self, window: Any) -> None:
        """Begin a window, of which a share was passed."""
        super().begin(window)
        if self.layout is not None:
            self._sums_at_the_end()

    def join(self, layout: Layout) -> None:
        """Join windows from the next attempt on."""
        super().join(layout)
        self._sums_at_the_end()

    def _sums_at_the_end(self) -> None:
        # A parameter has its gradient once all calls of its module have run back.
        self._overlaps = False
        self._group.summing.expect([], self._compression)

    def _begin_anew(self, num_samples: int = 0) -> None:
        super()._begin_anew(num_samples)
        self._has_told = self.is_refused = False
        self._ranks = self.reason = None

    def _backward(self, accumulate: Any, size: int) -> None:
        if self.layout is None:
            super()._backward(accumulate, size)
        else:
            super(SharedTransaction, self)._backward(accumulate, size)

    def _accumulate(self, loss: torch.Tensor, weight: Count, reduction: Reduction) -> None:
        super()._accumulate(loss if self._ranks is None else loss / self._ranks.size, weight, reduction)

    @property
    def is_waited_for(self) -> bool:
        """Return whether others wait for what this rank has to tell next."""
        return self._has_told or self.reason is not None or super().is_waited_for

    def give_up(self) -> None:
        """End an attempt that has failed on this rank, and in which others are."""
        super().give_up()
        if self.layout is not None:
            self.own_sizes = tuple(self._cut)

    def finish(self) -> Gradient | Repeat:
        """Complete the gradient; run the window now where it is joined."""
        if self.layout is None:
            return super().finish()
        sizes, share = tuple(self._cut), self._window
        try:
            outcome = super().finish()
        except LeftError:
            self._abandon()
            outcome = Repeat(sizes=sizes)
        finally:
            self.own_sizes, self._window = sizes, share
        if isinstance(outcome, Gradient):
            return replace(outcome, sizes=self._all_sizes)
        if not self.is_joined:  # all ranks know why
            self._has_told = False
        return outcome

    def _run_joined(self, layout: Layout, sizes: tuple[int, ...]) -> NotRowsError | None:
        """Run the window with the other ranks; return what has refused to be split."""
        device = self._job.device
        seed = int(torch.randint(2**62, ()))
        own, generators = get_state(device), list(self.snapshot.generators())
        whole: Any = whole_of(self._window)
        samples = self._window.num_samples
        batch = _moved(self._window.samples(range(samples)), "cpu") if whole is None and samples else None
        self._has_told = True
        states = [generator_state(one) for one in generators]
        begun: list[Begun] = self._group.exchange(Begun(sizes, seed, states, batch, self.has_room))
        if any(each is None for each in begun):
            raise LeftError
        self.is_refused = not all(each.has_room for each in begun)
        if self.is_refused:
            return None
        self._all_sizes = tuple(size for each in begun for size in each.sizes)
        ranks = self._ranks = TogetherRanks(self._group, layout, device, [sum(each.sizes) for each in begun])
        if whole is None:
            batches = [_moved(each.batch, device) for each in begun if each.sizes]
            whole = Gathered(self._job.split.join(batches), ranks.num_samples)
        # What the step itself draws is the same on all ranks.
        seed_all(begun[0].seed, device)
        for one, state in zip(generators, begun[0].generators, strict=True):
            set_generator_state(one, state)
        self._window = whole
        refused = super()._run_joined(layout, sizes)
        try:
            if refused is None:
                ranks.hear("has run it")  # another rank may refuse what this one ran
            elif not refused.is_agreed:
                ranks.hear(Refused.of(refused, layout))
        except NotRowsError as agreed:
            refused = agreed.with_traceback(None)
        set_state(own, device)
        return refused

    def _tell(self, own: Told) -> list[Told]:
        """Return what each rank tells; of a joined window the first one tells for all."""
        if self._ranks is not None and not self._group.is_first:
            nothing: dict[str, Any] = {"sizes": (), "reductions": (), "losses": (), "counts": (), "late": ()}
            own = replace(own, **nothing, norms={}, outputs={}, named=None)
        return super()._tell(own)
