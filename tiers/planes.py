"""The byte planes of many frames, unpacked and put together in few and large steps.

Whoever lets go of the interpreter's lock may wait long to have it back when several threads read.
So one call unpacks the planes of all frames, and another puts all their bytes into the elements,
instead of a few calls for each frame.

Invariant: what comes out does not depend on how many frames are read together, nor on which of
their planes were kept as they are. This module does not know checksums, records or files.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Slab:
    """Planes of one place in consecutive frames, one behind the other in memory.

    Attributes:
        place: of the bytes in their elements; 0 is the lowest.
        first_frame: whose plane is the first.
        planes: uint8 `[num_planes, plane_bytes]`.
    """

    place: int
    first_frame: int
    planes: Bytes


@dataclass(frozen=True, slots=True)
class PlaneTable:
    """Where the planes of some frames lie.

    Attributes:
        begins: index of the first byte of each plane, int64 `[element_bytes, num_frames]`.
        sizes: coded bytes of each, of the same shape; one of `plane_bytes` was kept as it is.
        plane_bytes: of a plane that is not coded.
    """

    begins: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    plane_bytes: int


def slabs_of(
    coded: Bytes, table: PlaneTable, decompressor: zstandard.ZstdDecompressor
) -> list[Slab]:
    """All planes of some frames.

    Args:
        coded: uint8, contiguous, with every plane of `table` in it.
        table: where they are.
        decompressor: no other thread uses it meanwhile.

    Raises:
        zstandard.ZstdError: a plane is nothing that zstd wrote, or has another size.
    """
    is_kept = table.sizes == table.plane_bytes
    is_packed = ~is_kept
    slabs: list[Slab] = []
    if is_kept.any():
        # Every run of `plane_bytes` bytes, so that one operation copies those that are planes.
        shape = (coded.size - table.plane_bytes + 1, table.plane_bytes)
        windows = np.ndarray(shape, np.uint8, coded, strides=(1, 1))
        slabs += _cut(is_kept, [windows[table.begins[is_kept]]])
    if is_packed.any():
        extents = np.stack([table.begins[is_packed], table.sizes[is_packed]], axis=-1)
        slabs += _cut(is_packed, _unpacked(coded, extents, table.plane_bytes, decompressor))
    return slabs


def join(slabs: Iterable[Slab], elements: npt.NDArray[Any]) -> None:
    """Fill `elements` (unsigned integers `[num_frames, plane_bytes]`) with all their bytes."""
    highest = elements.itemsize - 1
    # Whole elements at a time, several times faster than every second byte: highest byte first.
    for slab in sorted(slabs, key=lambda slab: -slab.place):
        rows = elements[slab.first_frame : slab.first_frame + len(slab.planes)]
        words = slab.planes if slab.place == highest else np.add(rows, slab.planes, out=rows)
        if slab.place:
            np.multiply(words, 256, out=rows, dtype=rows.dtype)  # faster than a shift
        elif words is not rows:
            rows[:] = words


def _unpacked(
    coded: Bytes,
    extents: npt.NDArray[np.int64],
    plane_bytes: int,
    decompressor: zstandard.ZstdDecompressor,
) -> list[Bytes]:
    """The planes of `extents` (begin and size of each), in as many arrays as zstd puts them in."""
    view = coded.data
    for begin, size in extents.tolist():  # checked first: zstd allocates what a plane claims
        claimed = zstandard.frame_content_size(view[begin : begin + size])
        if claimed != plane_bytes:
            raise zstandard.ZstdError(f"plane of {claimed} bytes, expected {plane_bytes}")
    # Numbers as zstd's C code has them: pairs of unsigned 64 bits, and the size of each plane.
    sources = zstandard.BufferWithSegments(view, extents.astype(np.uint64).tobytes())
    sizes = np.full(len(extents), plane_bytes, dtype=np.uint64).tobytes()
    found = decompressor.multi_decompress_to_buffer(sources, decompressed_sizes=sizes)
    planes = [found[at] for at in range(len(found))]
    assert len(planes) == len(extents)
    firsts = [
        at
        for at, plane in enumerate(planes)
        if at == 0 or plane.offset != planes[at - 1].offset + plane_bytes
    ]
    return [
        _array(planes[first], stop - first, plane_bytes)
        for first, stop in pairwise([*firsts, len(planes)])
    ]


def _array(plane: Any, num_planes: int, plane_bytes: int) -> Bytes:
    """The memory from a plane of zstd's on, uint8 `[num_planes, plane_bytes]`."""
    # It keeps the memory of all of them alive, and shows its own part of it.
    first = np.frombuffer(plane, dtype=np.uint8)
    shape, strides = (num_planes, plane_bytes), (plane_bytes, 1)
    return np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)


def _cut(is_there: npt.NDArray[np.bool_], arrays: Iterable[Bytes]) -> Iterator[Slab]:
    """Slabs of those planes of all that `arrays` have, place by place and frame by frame."""
    num_frames = is_there.shape[1]
    numbers: list[int] = np.flatnonzero(is_there).tolist()
    begin = 0
    for array in arrays:
        own = numbers[begin : begin + len(array)]
        begin += len(array)
        starts = [
            at
            for at, number in enumerate(own)
            if at == 0 or number != own[at - 1] + 1 or number % num_frames == 0
        ]
        for start, stop in pairwise([*starts, len(own)]):
            place, frame = divmod(own[start], num_frames)
            yield Slab(place, frame, array[start:stop])
