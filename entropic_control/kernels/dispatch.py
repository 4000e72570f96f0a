"""Which implementation of a kernel runs, and the checks every launcher makes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

from entropic_control.errors import CapabilityError, EntropicError
from entropic_control.kernels import _triton
from entropic_control.kernels._torch import torch

Mode = Literal["auto", "compiled", "interpreter", "reference"]
"""`compiled` is the Triton kernel on a CUDA device, `interpreter` the same kernel run by Triton's
interpreter, `reference` plain torch. `auto` takes the first of them that can be had."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class KernelInputError(EntropicError, ValueError):
    """A tensor of the wrong shape, type or device; the message names it."""


def resolve(mode: str, device: Any) -> str:
    """The implementation to run for tensors on `device`.

    Raises
    ------
    CapabilityError
        If `mode` is explicit and cannot be had here; `auto` never raises.
    """
    if mode not in get_args(Mode):
        raise KernelInputError(f"unknown mode {mode!r} (known: {', '.join(get_args(Mode))})")
    lacking = {"compiled": _lacking_compiled(device), "interpreter": _lacking_interpreter(device)}
    if mode == "auto":
        return next((name for name, reason in lacking.items() if not reason), "reference")
    if reason := lacking.get(mode):
        raise CapabilityError(f"mode {mode!r} cannot be had: {reason}")
    return mode


def _lacking_compiled(device: Any) -> str:
    if not _triton.AVAILABLE:
        return "triton is not installed"
    if device.type != "cuda":
        return f"the tensors are on {device}, not on a CUDA device"
    if _triton.INTERPRETED:
        return "TRITON_INTERPRET was set when triton was imported; start a process without it"
    return ""


def _lacking_interpreter(device: Any) -> str:
    if not _triton.AVAILABLE:
        return "triton is not installed"
    if not _triton.INTERPRETED:
        return "set TRITON_INTERPRET=1 before triton is first imported"
    return "" if device.type == "cpu" else f"the tensors are on {device}, not on the CPU"


def on(device: Any) -> AbstractContextManager[Any]:
    """Makes `device` current while a kernel is launched: Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check(
    name: str,
    tensor: Any,
    shape: tuple[int | None, ...],
    dtypes: Iterable[Any],
    like: Any = None,
    *,
    packed: bool = True,
) -> None:
    """Refuse a tensor that a kernel would read wrongly.

    Parameters
    ----------
    name : str
        The argument's name, for the message.
    tensor : torch.Tensor
        The argument.
    shape : tuple of int or None
        What its shape must be; None stands for any size.
    dtypes : iterable of torch.dtype
        Allowed element types.
    like : torch.Tensor, optional
        A tensor whose device it must share.
    packed : bool
        Whether it must be contiguous; otherwise only its last axis must be.

    Raises
    ------
    KernelInputError
        Naming the argument and what was expected.
    """
    if not isinstance(tensor, torch.Tensor):
        raise KernelInputError(f"{name} must be a torch tensor, not {type(tensor).__name__}")
    fits = tensor.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelInputError(f"{name} must have shape ({wanted}), not {tuple(tensor.shape)}")
    allowed = tuple(dtypes)
    if tensor.dtype not in allowed:
        raise KernelInputError(
            f"{name} must be {' or '.join(str(d) for d in allowed)}, not {tensor.dtype}"
        )
    if like is not None and tensor.device != like.device:
        raise KernelInputError(f"{name} is on {tensor.device}, the other tensors on {like.device}")
    if not (tensor.is_contiguous() if packed else tensor.stride(-1) == 1 or tensor.shape[-1] == 1):
        raise KernelInputError(f"{name} must be contiguous{'' if packed else ' in its last axis'}")


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
