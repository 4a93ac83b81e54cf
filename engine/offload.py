"""Layers whose matrices wait in host memory and pass through two slots on the device, one ahead of the other.

While a layer computes, the next one is copied on a stream of its own. Everything hangs on hooks around the layers:
what a layer computes, and how, is left alone. Vectors and buffers, such as norms and tables, stay on the device, so
that code which fuses over the border of two layers finds them there.
"""

import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from solgen.errors import SetupError

ALIGNMENT = 512
"""Bytes between the starts of tensors, as PyTorch's own allocator has it: kernels are chosen by alignment too."""


@dataclass
class Shelf:
    """One layer's matrices in host memory.

    Attributes:
        bytes: All of them in one piece, page-locked for a GPU.
        parts: Every parameter, where it begins in the piece, and its tensor there.
    """

    bytes: Tensor
    parts: list[tuple[nn.Parameter, int, Tensor]]

    @classmethod
    def of(cls, layer: nn.Module, device: torch.device) -> "Shelf":
        """Move a layer's matrices into one piece of host memory, and everything else to the device."""
        matrices = [parameter for parameter in layer.parameters() if parameter.ndim >= 2]
        starts = [0]
        for parameter in matrices:
            starts.append(starts[-1] + -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT)
        piece = _page_locked(starts[-1]) if device.type == "cuda" else torch.empty(starts[-1], dtype=torch.uint8)
        parts = []
        for parameter, start in zip(matrices, starts, strict=False):
            tensor = _view(piece, start, parameter).copy_(parameter.data)
            parameter.data = tensor
            parts.append((parameter, start, tensor))
        for parameter in layer.parameters():
            if parameter.ndim < 2:
                parameter.data = parameter.data.to(device)
        for module in layer.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        return cls(piece, parts)


class Slot:
    """Room for one layer on the device.

    Attributes:
        holds: Number of the layer whose bytes are there or on their way.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.holds: int | None = None
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.filled = torch.cuda.Event() if device.type == "cuda" else None
        self.used = torch.cuda.Event() if device.type == "cuda" else None


class LayerStream:
    """Two slots that the layers of one model take turns in, in any order; in their own order they never wait twice."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        with torch.no_grad():
            self._shelves = [Shelf.of(layer, device) for layer in layers]
        size = max(shelf.bytes.numel() for shelf in self._shelves)
        self._slots = [Slot(size, device), Slot(size, device)]
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)
            # The slots may be memory that kernels still use, and be let go while a copy is under way.
            self._copies.wait_stream(torch.cuda.current_stream(device))
            for slot in self._slots:
                slot.bytes.record_stream(self._copies)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda _layer, _args, number=number: self._enter(number))
            layer.register_forward_hook(
                lambda _layer, _args, _output, number=number: self._leave(number), always_call=True
            )

    def _enter(self, number: int) -> None:
        """Point a layer's parameters at its bytes on the device, and send for the next layer."""
        first, second = self._slots
        slot, other = (second, first) if second.holds == number else (first, second)
        if slot.holds != number:
            self._fetch(number, slot)
        if slot.filled is not None:
            torch.cuda.current_stream().wait_event(slot.filled)
        for parameter, start, _ in self._shelves[number].parts:
            parameter.data = _view(slot.bytes, start, parameter)
        following = (number + 1) % len(self._shelves)
        if following != number and other.holds != following:
            self._fetch(following, other)

    def _leave(self, number: int) -> None:
        """Point a layer's parameters back at host memory, whether it succeeded or not."""
        for parameter, _, tensor in self._shelves[number].parts:
            parameter.data = tensor
        for slot in self._slots:
            if slot.holds == number and slot.used is not None:
                slot.used.record()

    def _fetch(self, number: int, slot: Slot) -> None:
        """Copy a layer into a slot, once the kernels that read the slot have run."""
        shelf = self._shelves[number]
        with self._copying(slot):
            slot.bytes[: shelf.bytes.numel()].copy_(shelf.bytes, non_blocking=True)
        slot.holds = number

    @contextmanager
    def _copying(self, slot: Slot) -> Iterator[None]:
        if self._copies is None or slot.filled is None or slot.used is None:
            yield
            return
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(slot.used)
            yield
            slot.filled.record()


def stream_layers(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Keep the matrices of layers in host memory and pass them through the device whenever a layer runs.

    Args:
        layers: Called one at a time, best in this order; their parameters may lie anywhere. Outside of its forward a
            layer's matrices are on the host.
        device: Where they run. On a CPU the same copies are made, which helps nobody but a test.
    """
    LayerStream(layers, device)


def _view(piece: Tensor, start: int, like: Tensor) -> Tensor:
    """The tensor of a parameter's type and shape that begins at a byte of a piece."""
    return piece[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _page_locked(size: int) -> Tensor:
    """Page-locked host memory of exactly this many bytes; PyTorch's own pinned allocator rounds to powers of two.

    Raises:
        SetupError: if the machine cannot spare it.
    """
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        piece = torch.frombuffer(memory, dtype=torch.uint8)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 0))
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise SetupError(
            f"cannot page-lock {size / 2**30:.2f} GiB more of host memory for a layer ({reason}); use --offload none"
        ) from error
    weakref.finalize(piece, _unlock, piece.data_ptr()).atexit = False
    return piece


def _unlock(address: int) -> None:
    torch.cuda.synchronize()  # the last layer of a call has sent for the first one again
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
