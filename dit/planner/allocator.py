"""PyTorch's CUDA caching allocator, replayed over a list of allocations and frees.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` in PyTorch, for one device, one stream and default settings
but for ``expandable_segments``. A request is rounded up to 512 bytes; up to 1 MiB it is served from the small pool,
above from the large one. The smallest free block that fits is taken, lowest address first, and split if the rest is
worth it. Where none fits, a new segment is taken from the driver; where the driver has no more, everything cached is
given back and the request tried once more. Needs no torch and no GPU. All sizes are bytes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MIN_BLOCK = 512  # kMinBlockSize
SMALL_SIZE = 1 << 20  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 << 20  # kSmallBuffer
LARGE_SEGMENT = 20 << 20  # kLargeBuffer
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc: from here on a request gets a segment of its own size
ROUND_LARGE = 2 << 20  # kRoundLarge

# Free blocks are kept sorted by (size, address), packed into one integer because comparing integers is fast.
_ADDRESS_BITS = 60
_ADDRESS_SPACE = LARGE_SEGMENT << 33  # of one expandable segment: never exhausted, and a multiple of every page size


def round_size(num_bytes: int) -> int:
    """Bytes of the block that serves a request of ``num_bytes`` > 0 (before any rest too small to split off)."""
    return (num_bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK


def segment_size(size: int) -> int:
    """Bytes taken from the driver for a block of ``size`` (rounded) bytes, without expandable segments."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOC:
        return LARGE_SEGMENT
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


class Block:
    """A stretch of a segment. ``prev`` and ``next`` are its neighbours in address order inside the same segment."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "prev", "requested", "size")

    def __init__(self, pool: "_Pool", address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.prev: Block | None = None
        self.next: Block | None = None
        self.free = True
        self.mapped = True
        self.requested = 0


class _Pool:
    """The free blocks of one pool, and (expandable segments) the stretches of its address space without memory."""

    def __init__(self, small: bool, page: int) -> None:
        self.small = small
        self.page = page  # mapping granularity of an expandable segment
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[tuple[int, Block]] = []

    def insert(self, block: Block) -> None:
        if not block.mapped:
            insort(self.unmapped, (block.address, block))
            return
        key = block.size << _ADDRESS_BITS | block.address
        self.blocks[key] = block
        insort(self.keys, key)

    def remove(self, block: Block) -> None:
        if not block.mapped:
            del self.unmapped[bisect_left(self.unmapped, block.address, key=lambda entry: entry[0])]
            return
        key = block.size << _ADDRESS_BITS | block.address
        del self.blocks[key]
        del self.keys[bisect_left(self.keys, key)]


class OutOfMemory(Exception):
    """Even with everything cached given back there is no room. :func:`simulate` turns it into a field of its result."""


class CachingAllocator:
    """The allocator's state: :meth:`allocate` and :meth:`free` by the caller's own identifiers.

    ``capacity_bytes`` is what the driver can hand to this process's allocator (device memory less context, libraries
    and other processes); None: endless. Counters carry the names of ``torch.cuda.memory_stats``.
    """

    def __init__(self, capacity_bytes: int | None = None, expandable_segments: bool = False) -> None:
        self.capacity = float("inf") if capacity_bytes is None else capacity_bytes
        self.expandable = expandable_segments
        self.small = _Pool(True, SMALL_SEGMENT)
        self.large = _Pool(False, LARGE_SEGMENT)
        self.live: dict[int, Block] = {}
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_device_allocs = self.num_alloc_retries = 0
        self._next_address = 0
        self._heads: dict[int, Block] = {}
        if expandable_segments:
            for index, pool in enumerate((self.small, self.large)):
                tail = Block(pool, index * _ADDRESS_SPACE, _ADDRESS_SPACE)
                tail.mapped = False
                pool.insert(tail)
                self._heads[tail.address] = tail

    def allocate(self, tensor_id: int, num_bytes: int) -> Block:
        """Serve a request of ``num_bytes`` > 0. Raises OutOfMemory; the state is then that after the failed retry."""
        assert tensor_id not in self.live, f"tensor {tensor_id} is allocated already"
        size = round_size(num_bytes)
        pool = self.small if size <= SMALL_SIZE else self.large
        keys = pool.keys
        index = bisect_left(keys, size << _ADDRESS_BITS)
        if index < len(keys):
            if self.expandable:
                index = self._best_expandable(pool, index)
            block = pool.blocks.pop(keys.pop(index))
        else:
            block = self._grow(pool, size)
        rest = block.size - size
        if rest >= MIN_BLOCK if pool.small or self.expandable else rest > SMALL_SIZE:
            self._split(block, size)
        block.free = False
        block.requested = num_bytes
        self.live[tensor_id] = block
        self.allocated_bytes += block.size
        self.requested_bytes += num_bytes
        return block

    def free(self, tensor_id: int) -> None:
        """Give a tensor's block back to its pool, merged with free neighbours."""
        block = self.live.pop(tensor_id)
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        block.free = True
        self._merge_neighbours(block)
        block.pool.insert(block)

    def segments(self) -> Iterator[list[Block]]:
        """Every segment as its blocks in address order (allocated, free, or not mapped). For inspection and tests."""
        for head in self._heads.values():
            blocks, block = [], head
            while block is not None:
                blocks.append(block)
                block = block.next
            yield blocks

    def release_cached(self) -> None:
        """Give back to the driver whatever no tensor uses: whole free segments, or free pages of expandable ones."""
        for pool in (self.large, self.small):
            for block in [pool.blocks[key] for key in pool.keys]:
                if self.expandable:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    pool.remove(block)
                    del self._heads[block.address]
                    self.reserved_bytes -= block.size

    # ---- free blocks ----

    @staticmethod
    def _split(block: Block, size: int) -> None:
        """Cut ``block`` to ``size`` and put the rest into its pool."""
        rest = Block(block.pool, block.address + size, block.size - size)
        rest.mapped = block.mapped
        rest.prev, rest.next = block, block.next
        if rest.next is not None:
            rest.next.prev = rest
        block.next, block.size = rest, size
        block.pool.insert(rest)

    def _merge_neighbours(self, block: Block) -> None:
        """Swallow the neighbours that are free and, like ``block`` itself, all mapped or all not."""
        before, after = block.prev, block.next
        if before is not None and before.free and before.mapped == block.mapped:
            block.pool.remove(before)
            block.address, block.size, block.prev = before.address, block.size + before.size, before.prev
            if block.prev is not None:
                block.prev.next = block
            else:
                self._heads[block.address] = block
        if after is not None and after.free and after.mapped == block.mapped:
            block.pool.remove(after)
            block.size, block.next = block.size + after.size, after.next
            if block.next is not None:
                block.next.prev = block

    @staticmethod
    def _best_expandable(pool: _Pool, index: int) -> int:
        """A free block counts as large as it could grow, so the one at the end of the segment is taken last."""
        def reach(key: int) -> int:
            block = pool.blocks[key]
            return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)

        while index + 1 < len(pool.keys) and reach(pool.keys[index + 1]) < reach(pool.keys[index]):
            index += 1
        return index

    # ---- memory from the driver ----

    def _grow(self, pool: _Pool, size: int) -> Block:
        """A free block of at least ``size`` in new memory, after one retry with the cache given back."""
        take = self._expand if self.expandable else self._new_segment
        block = take(pool, size)
        if block is None:
            self.release_cached()
            self.num_alloc_retries += 1
            block = take(pool, size)
        if block is None:
            raise OutOfMemory
        return block

    def _reserve(self, num_bytes: int) -> bool:
        if self.reserved_bytes + num_bytes > self.capacity:
            return False
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.num_device_allocs += 1
        return True

    def _new_segment(self, pool: _Pool, size: int) -> Block | None:
        size = segment_size(size)
        if not self._reserve(size):
            return None
        block = Block(pool, self._next_address, size)
        self._next_address += size
        self._heads[block.address] = block
        return block

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        """Map memory at the lowest address where ``size`` bytes are free or unmapped in a row."""
        block = self._lowest_gap(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # what was mapped swallowed the free block before it
        pool.remove(block)
        return block

    @staticmethod
    def _lowest_gap(pool: _Pool, size: int) -> Block:
        for _, block in pool.unmapped:
            start = block.prev if block.prev is not None and block.prev.free else block
            found, end = 0, start
            while end is not None and end.free and found < size:
                found, end = found + end.size, end.next
            if found >= size:
                return start
        raise AssertionError("the address space of an expandable segment is endless")

    def _map(self, block: Block, size: int) -> bool:
        """Back the first ``size`` bytes of an unmapped block, rounded up to pages, with memory; all or nothing."""
        page = block.pool.page
        size = (size + page - 1) // page * page
        if not self._reserve(size):
            return False
        block.pool.remove(block)
        if size < block.size:
            self._split(block, size)
        block.mapped = True
        self._merge_neighbours(block)
        block.pool.insert(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages inside a free block."""
        pool, page = block.pool, block.pool.page
        start = (block.address + page - 1) // page * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            self._split(block, start - block.address)
            pool.insert(block)
            block = block.next
            pool.remove(block)
        if end < block.address + block.size:
            self._split(block, end - block.address)
        block.mapped = False
        self.reserved_bytes -= block.size
        self._merge_neighbours(block)
        pool.insert(block)


@dataclass(frozen=True)
class Failure:
    """The request that could not be served: its event, its size, and what was held after the retry."""

    event: int
    tensor_id: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class PhasePeak:
    """Highest levels in a range of events, the level at its start included, as after ``reset_peak_memory_stats``."""

    allocated_bytes: int
    requested_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class AllocatorResult:
    """Outcome of :func:`simulate`.

    ``allocated`` counts blocks, as ``torch.cuda.memory_allocated`` does; ``requested`` counts what tensors asked for.
    The three curves hold the level after each event, up to the failing one if ``oom`` is set. ``phases`` has one entry
    per range of ``phase_bounds``: None where the run had died before the range began.
    """

    peak_allocated_bytes: int
    peak_requested_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int
    end_reserved_bytes: int
    num_segments: int
    num_device_allocs: int
    num_retries: int
    oom: Failure | None
    phases: tuple[PhasePeak | None, ...]
    allocated_curve: list[int] = field(repr=False)
    requested_curve: list[int] = field(repr=False)
    reserved_curve: list[int] = field(repr=False)


def simulate(
    events: Sequence[tuple[int, int]],
    *,
    capacity_bytes: int | None = None,
    expandable_segments: bool = False,
    phase_bounds: Sequence[tuple[int, int]] = (),
) -> AllocatorResult:
    """Replay ``events`` through a fresh caching allocator.

    ``events``: (tensor id, bytes) in order; positive bytes allocate, negative free (the id counts, not the number),
    zero is skipped, as a tensor without elements takes no block. An array of shape (N, 2) works too.
    ``capacity_bytes``: what the driver can give; None: endless. ``phase_bounds``: (start, stop) ranges of event indices
    whose peaks are wanted. Running out of memory ends the replay and is reported in ``oom``, never raised.

    A larger capacity is not always kinder: as on the real device, giving the cache back early can leave a better layout
    than not having had to. What holds: without retries at one capacity, every larger one gives the same result.
    """
    if hasattr(events, "tolist"):
        events = events.tolist()
    allocator = CachingAllocator(capacity_bytes, expandable_segments)
    allocate, free = allocator.allocate, allocator.free
    allocated: list[int] = []
    requested: list[int] = []
    reserved: list[int] = []
    failure = None
    for tensor_id, num_bytes in events:
        try:
            if num_bytes > 0:
                allocate(tensor_id, num_bytes)
            elif num_bytes:
                free(tensor_id)
        except OutOfMemory:
            failure = Failure(len(allocated), tensor_id, num_bytes, allocator.allocated_bytes, allocator.reserved_bytes)
            break
        allocated.append(allocator.allocated_bytes)
        requested.append(allocator.requested_bytes)
        reserved.append(allocator.reserved_bytes)
    return AllocatorResult(
        peak_allocated_bytes=max(allocated, default=0),
        peak_requested_bytes=max(requested, default=0),
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        end_allocated_bytes=allocator.allocated_bytes,
        end_reserved_bytes=allocator.reserved_bytes,
        num_segments=sum(any(block.mapped for block in segment) for segment in allocator.segments()),
        num_device_allocs=allocator.num_device_allocs,
        num_retries=allocator.num_alloc_retries,
        oom=failure,
        phases=tuple(_phase_peak(start, stop, allocated, requested, reserved) for start, stop in phase_bounds),
        allocated_curve=allocated,
        requested_curve=requested,
        reserved_curve=reserved,
    )


def _phase_peak(start: int, stop: int, *curves: list[int]) -> PhasePeak | None:
    if start > len(curves[0]):
        return None
    return PhasePeak(*(max([0, *curve][start:max(start, stop) + 1]) for curve in curves))
