"""Records the random draws of a forward and backward, and gives parts of its batch their own rows of them.

A batch and its parts can be compared only under the same noise. The same seed does not do: it gives each part the first
rows of the noise, and so calls every model with dropout wrong. What draws is told by the tag that PyTorch gives its
operations (``nondeterministic_seeded``), whatever the layer is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.data.randomness import as_bytes, default_generator
from autoaccum.step.loss_graph import HALVES

_SEED = 0x6175746F61636375

FUSED = {
    "_efficient_attention_forward",
    "_flash_attention_forward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_fused_attention_overrideable",
}
"""Operations that draw the mask of their dropout inside of a kernel."""


class UnalignedError(Exception):
    """The draws of a part that are not found among those of the whole."""


class UnsettledError(Exception):
    """A draw that neither rows nor a constant can stand in for."""


@functools.cache  # asked of each operation, of which there are thousands in a forward
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


_reads: ContextVar[bool] = ContextVar("reads", default=False)


@contextmanager
def reading() -> Iterator[None]:
    """Let whatever is drawn within go its way: what data draw while they are read is drawn anew for each part.

    By seeds of their own, so that it has no rows to keep, and would be taken for what the model draws.
    """
    token = _reads.set(True)
    try:
        yield
    finally:
        _reads.reset(token)


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which random operations are watched, or stood in for, and nothing is rounded to 16 bits."""

    def __init__(self, *, keeps_wide: bool) -> None:
        """Set up.

        Args:
            keeps_wide: whether what an autocast of the user's own would round to 16 bits stays as it is. Not beside
                parameters of 16 bits, with which nothing wider can be multiplied.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps_wide = keeps_wide
        self.has_kept_wide = False
        """Whether anything was kept from being rounded."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or what stands for it."""
        kwargs = kwargs or {}
        if _reads.get():
            return func(*args, **kwargs)
        if _is_random(func):
            generator = kwargs.get("generator")
            before = state_of(generator)
            # It draws also where something stands for that: only then is it known to, for a dropout of 0 does not.
            returned = func(*args, **kwargs)
            return returned if before == state_of(generator) else self.draw(func, args, kwargs, returned)
        if func is torch.ops.aten._to_copy.default and self._keeps_wide and kwargs.get("dtype") in HALVES:
            self.has_kept_wide = True
            kwargs = {**kwargs, "dtype": args[0].dtype}
        return func(*args, **kwargs)

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> Any:
        """Run a random operation, or what stands for it; here there is nothing to stand for one.

        Raises:
            UnalignedError: the whole drew nothing.
        """
        raise UnalignedError(str(func))


class Recording(Draws):  # type: ignore[no-untyped-call]
    """A mode that lets operations draw, and keeps what they drew on the host."""

    def __init__(
        self, device: torch.device, *, keeps_wide: bool, held: Sequence[torch.Generator] = (), seed: int = 0
    ) -> None:
        """Begin with no draws, from another seed than any program's: what draws from that one has sown it itself.

        Args:
            device: what the program runs on, which has a generator of its own.
            keeps_wide: see ``Draws``.
            held: generators of the program's own; others that it draws from are made anew in each forward.
            seed: tells which of several seeds.
        """
        super().__init__(keeps_wide=keeps_wide)
        self._held = [torch.default_generator, default_generator(device), *held]
        self._seed = _SEED + seed
        for generator in self._held:
            generator.manual_seed(self._seed)
        self._sown = [state_of(generator) for generator in self._held]
        self.draws: list[tuple[Any, torch.Tensor | None]] = []
        """(operation, what it drew; None where the program has sown that itself), in the order in which they ran."""
        self.generators: list[Any] = []
        """The generators that were passed, so that another one is told from them."""
        self.has_rows = True
        """Whether each sample has its own part in all that was drawn."""
        self.shared: list[bool] = []
        """Of each part that was run, whether it was given something that was drawn once, for all samples together."""
        self.has_fused = False
        """Whether a fused attention drew, which shows nothing of it."""

    def has_moved(self) -> bool:
        """Return whether one of its generators has drawn since it was sown."""
        return any(state_of(one) != state for one, state in zip(self._held, self._sown, strict=True))

    @property
    def has_shown_nothing(self) -> bool:
        """Return whether there was nothing to keep, so that what does the same needs no watching."""
        return not (self.draws or self.has_fused or self.has_kept_wide)

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> Any:
        """Keep what was drawn."""
        self.generators.append(kwargs.get("generator"))
        # A dropout returns what is left of its input, and its mask; an RReLU has its slopes in its second argument.
        kept = returned
        if name_of(func) in FUSED:
            self.has_fused = True  # it keeps its mask to itself
            return returned
        if not isinstance(returned, torch.Tensor):
            kept = returned[1]
        elif name_of(func) == "rrelu_with_noise":
            kept = args[1]
        generator = default_generator(kept.device) if kwargs.get("generator") is None else kwargs["generator"]
        is_sown = any(generator is one for one in self._held) and generator.initial_seed() != self._seed
        self.has_rows = self.has_rows and not is_sown and any(generator is one for one in self._held)
        self.draws.append((func, None if is_sown else kept.detach().to("cpu", copy=True)))
        return returned


class Replaying(Draws):  # type: ignore[no-untyped-call]
    """A mode that gives a part of a batch its samples' rows of what was drawn for the whole."""

    def __init__(self, recorded: Recording, rows: Sequence[int], num_samples: int, *, keeps_wide: bool) -> None:
        """Set up.

        Args:
            recorded: the draws of the whole.
            rows: the samples of the part, by their place in the whole.
            num_samples: samples of the whole.
            keeps_wide: see ``Draws``.
        """
        super().__init__(keeps_wide=keeps_wide)
        self._recorded = recorded
        self._is_shared = False
        self._next = 0  # of the draws of the whole
        self._generators = recorded.generators
        self._rows = torch.tensor(rows, device="cpu")
        self._num_samples = num_samples

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> Any:
        """Return the rows in place of a draw.

        Raises:
            UnalignedError: the whole drew otherwise.
        """
        draws = self._recorded.draws
        if self._next >= len(draws) or draws[self._next][0] is not func:
            raise UnalignedError(str(func))
        drawn = draws[self._next][1]
        self._next += 1
        # One that the program makes or sows anew in each forward gives each part the same: that is what it asks for.
        given = kwargs.get("generator")
        if drawn is None or (given is not None and not any(given is known for known in self._generators)):
            return returned
        if not isinstance(returned, torch.Tensor):
            kept = self._rows_of(drawn, returned[1])
            # As the operation has it, to the bit; where all is dropped it is no number times nothing.
            return args[0] * kept * (0.0 if args[1] == 1 else 1 / (1 - args[1])), kept
        if name_of(func) == "rrelu_with_noise":
            args[1].copy_(self._rows_of(drawn, args[1]))
            return returned.copy_(args[0] * args[1])
        return returned.copy_(self._rows_of(drawn, returned))

    def __exit__(self, *raised: Any) -> None:
        """Tell the recording what was drawn once, for all samples together."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        # A run draws it for each micro-batch by itself, which no comparison under the same draw shows. Of what is drawn
        # for one sample after the other a part draws less.
        if len(self._rows) < self._num_samples:
            self._recorded.shared.append(self._is_shared and self._next >= len(self._recorded.draws))

    def _rows_of(self, drawn: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the part's rows of what was drawn for the whole, in the part's shape.

        Raises:
            UnalignedError: they do not show.
        """
        # The first samples of an order are no order of fewer samples.
        if drawn.ndim != wanted.ndim or (drawn.dtype == torch.int64 and _is_order(drawn) and len(drawn) != len(wanted)):
            raise UnalignedError("a part")
        differing = [dim for dim, size in enumerate(wanted.shape) if drawn.shape[dim] != size]
        self._is_shared = self._is_shared or (not differing and len(self._rows) < self._num_samples)
        own = self._dims_of_samples(drawn, wanted)
        for dim in differing:
            have, size = drawn.shape[dim], wanted.shape[dim]
            if dim in own:
                # Several rows of each sample lie side by side, as where samples and times are one dimension.
                each = have // self._num_samples
                drawn = drawn.index_select(
                    dim, (self._rows[:, None] * each + torch.arange(each, device="cpu")).flatten()
                )
            elif size < have and (own or self._num_samples in drawn.shape):
                drawn = drawn.narrow(dim, 0, size)  # the whole was padded to a longer sample
            else:
                raise UnalignedError("a part")
        return drawn.to(wanted.device)

    def _dims_of_samples(self, drawn: torch.Tensor, wanted: torch.Tensor) -> list[int]:
        """Return the dims in which samples lie: those of as many, or the first that has several rows for each."""
        found = [
            dim
            for dim, (have, size) in enumerate(zip(drawn.shape, wanted.shape, strict=True))
            if have != size and have * len(self._rows) == size * self._num_samples and not have % self._num_samples
        ]
        # By chance the lengths to which whole and part are padded may be in the same ratio.
        exact = [dim for dim in found if drawn.shape[dim] == self._num_samples]
        return exact or found[:1]


def _is_order(drawn: torch.Tensor) -> bool:
    """Return whether some draw is an order of the numbers from 0 on."""
    return (
        drawn.ndim == 1
        and len(drawn) > 1
        and bool((drawn.sort().values == torch.arange(len(drawn), device=drawn.device)).all())
    )


class Constants(Draws):  # type: ignore[no-untyped-call]
    """A mode in which a draw is the same for each sample: nothing is dropped, noise has one value."""

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> Any:
        """Return a constant in place of a draw.

        Raises:
            UnsettledError: none stands for what this operation draws.
        """
        given = {argument.name: argument.default_value for argument in func._schema.arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        name = name_of(func)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name not in _CONSTANTS:
            raise UnsettledError(str(func))
        return returned.copy_(_CONSTANTS[name](given, returned))


def _probability(given: dict[str, Any], _: torch.Tensor) -> Any:
    """Return what a mask is on average, so that one that is divided by it leaves everything as it is."""
    p = given.get("p")
    return _tensor(given["self"] if p is None else p)


def _middle(given: dict[str, Any], _: torch.Tensor) -> torch.Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return _tensor((low + high) / 2)


def _off_the_mean(given: dict[str, Any], _: torch.Tensor) -> torch.Tensor:
    # Not the mean itself, beside which the spread would have no gradient.
    mean, spread = given.get("mean", 0.0), given.get("std", 1.0)
    return _tensor(mean + spread / 2)


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def _least(given: dict[str, Any], _: torch.Tensor) -> torch.Tensor:
    return _tensor(given.get("from", given.get("low", 0)))


def _likeliest(given: dict[str, Any], returned: torch.Tensor) -> torch.Tensor:
    weights = given["self"]
    order: torch.Tensor = weights.argsort(dim=-1, descending=True)
    return order[..., : returned.shape[-1]]


def _unlike_shares(given: dict[str, Any], _: torch.Tensor) -> torch.Tensor:
    # Not their mean: halves of two samples would be the same two of each other.
    weights: torch.Tensor = given["self"] * torch.arange(1, given["self"].shape[-1] + 1, device=given["self"].device)
    return weights / weights.sum(-1, keepdim=True)


# None is 0 that is seldom 0: what it multiplies would not be measured.
_CONSTANTS: dict[str, Callable[[dict[str, Any], torch.Tensor], torch.Tensor]] = {
    "_sample_dirichlet": _unlike_shares,
    "_standard_gamma": lambda given, _: given["self"],
    "bernoulli": _probability,
    "bernoulli_": _probability,
    "binomial": lambda given, _: (given["count"] * given["prob"]).ceil(),
    "cauchy_": lambda given, _: torch.tensor(given.get("median", 0.0) + given.get("sigma", 1.0) / 2),
    "exponential_": lambda given, _: torch.tensor(1 / given["lambd"]),
    "geometric_": lambda given, _: torch.tensor(1 / given["p"]).round(),
    "log_normal_": lambda given, _: torch.tensor(given.get("mean", 1.0) + given.get("std", 2.0) / 2).exp(),
    "multinomial": _likeliest,
    "normal": _off_the_mean,
    "normal_": _off_the_mean,
    "poisson": lambda given, _: given["self"].ceil(),
    "rand": _middle,
    "rand_like": _middle,
    "randint": _least,
    "randint_like": _least,
    "randn": _off_the_mean,
    "randn_like": _off_the_mean,
    "random_": _least,
    # Not in their order: an order of samples pairs each with another one.
    "randperm": lambda _, returned: torch.arange(len(returned)).flip(0),
    "uniform_": _middle,
}
"""(arguments, what was drawn) -> what stands for it, by the name of the operation."""


def state_of(generator: torch.Generator | None = None) -> list[bytes]:
    """Return the state of a generator; None: those of all that an operation draws from if it is given none."""
    if generator is not None:
        return [as_bytes(generator.get_state())]
    states = [as_bytes(torch.default_generator.get_state())]
    # A build for CUDA names its accelerator where there is no driver too, and reading that one's state would fail.
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        states.append(as_bytes(torch.get_device_module(device).get_rng_state()))
    return states


def name_of(func: Any) -> str:
    """Return the name of an operation, whatever its overload."""
    name: str = func.overloadpacket.__name__
    return name


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Expect that nothing is drawn, which takes much less than to watch each operation.

    Raises:
        UnalignedError: something was, by a part alone.
    """
    before = state_of()
    yield
    if before != state_of():
        raise UnalignedError("a part")
