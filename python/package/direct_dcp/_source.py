"""Rows that go to their final places: one behind the other, or in the pages of a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from . import _buffer, _rows
from .errors import InvalidArgument


# Rows of a page, bytes from page to page and from row to row, and the slots, for the native module.
_Pages = tuple[int, int, int, _rows.Span]


class Cache(NamedTuple):
    """A cache ``[pages, page_rows, ...]``, which may be a view of something wider."""

    nbytes: int
    page_rows: int
    page_stride: int
    row_stride: int

    def pages(self, slots: _rows.Span) -> _Pages:
        """What the native module takes."""
        return self.page_rows, self.page_stride, self.row_stride, slots

    @staticmethod
    def of(shape: Sequence[int], strides: Sequence[int], itemsize: int, row_bytes: int) -> Cache:
        """The cache of an array of this shape, with strides in bytes."""
        if len(shape) < 2 or any(stride < 0 for stride in strides):
            raise InvalidArgument(
                f"cache: expected [pages, page_rows, ...] in ascending order, got shape "
                f"{list(shape)} with strides {list(strides)}"
            )
        got = itemsize
        for extent, stride in zip(reversed(shape[2:]), reversed(strides[2:])):
            if extent != 1 and stride != got:
                raise InvalidArgument("cache: expected rows that are contiguous")
            got *= extent
        if got != row_bytes:
            raise InvalidArgument(f"cache: expected rows of {row_bytes} bytes, got {got}")
        pages, page_rows = shape[:2]
        page_stride, row_stride = strides[:2]
        last = (pages - 1) * page_stride + (page_rows - 1) * row_stride
        nbytes = last + row_bytes if pages and page_rows else 0
        return Cache(nbytes, page_rows, page_stride, row_stride)


@contextmanager
def source(
    rows: Any, slots: Any, row_bytes: int, device: int | None
) -> Iterator[tuple[_rows.Span, _Pages | None]]:
    """A context in which rows of `row_bytes` bytes have an address, or the cache in which they are
    at `slots`."""
    if device is None and slots is None:
        with _rows.host("rows", rows) as memory:
            yield memory, None
    elif device is None:
        words = _rows.words("slots", slots)
        with _cache_on_host(rows, row_bytes) as (address, cache), _rows.host("slots", words) as at:
            yield (address, cache.nbytes), cache.pages(at)
    elif slots is None:
        yield _rows.device("rows", rows, device), None
    else:
        address = _rows.device_address("cache", rows, device)
        cache = _cache_on_device(rows, row_bytes)
        yield (address, cache.nbytes), cache.pages(_rows.device_words("slots", slots, device))


@contextmanager
def _cache_on_host(cache: Any, row_bytes: int) -> Iterator[tuple[int, Cache]]:
    if _rows.is_tensor(cache):
        _rows.on_cpu("cache", cache)
        yield cache.data_ptr(), _of_tensor(cache, row_bytes)
        return
    with _buffer.Exported("cache", cache, _buffer.STRIDED) as (address, _):
        view = memoryview(cache)
        # They are None only for a view that was released.
        shape, strides = view.shape or (), view.strides or ()
        yield address, Cache.of(shape, strides, view.itemsize, row_bytes)


def _cache_on_device(cache: Any, row_bytes: int) -> Cache:
    if _rows.is_tensor(cache):
        return _of_tensor(cache, row_bytes)
    interface = cache.__cuda_array_interface__
    shape, itemsize = interface["shape"], int(interface["typestr"][2:])
    strides = interface.get("strides") or _dense(shape, itemsize)
    return Cache.of(shape, strides, itemsize, row_bytes)


def _of_tensor(cache: Any, row_bytes: int) -> Cache:
    strides = [stride * cache.itemsize for stride in cache.stride()]
    return Cache.of(tuple(cache.shape), strides, cache.itemsize, row_bytes)


def _dense(shape: Sequence[int], itemsize: int) -> list[int]:
    strides = [itemsize]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return strides
