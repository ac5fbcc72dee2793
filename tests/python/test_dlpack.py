"""DLPack's protocol: a consumer takes a capsule once, renames it, and calls its deleter once. Without a consumer, the
capsule's destructor does. The exporters here count deleters, and spoil the memory that they free.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import hopwell
import numpy as np
import pytest

NAMES = {False: b"dltensor", True: b"dltensor_versioned"}
both_kinds = pytest.mark.parametrize("versioned", [False, True])


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", Deleter)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


api = ctypes.pythonapi
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
_name_in_destructor = ctypes.PyDLL(None).PyCapsule_GetName
_name_in_destructor.restype, _name_in_destructor.argtypes = ctypes.c_char_p, [ctypes.c_void_p]


class Exporter:
    """Exports copies of an array as capsules. `freed` counts the deleters that ran, of takers and of capsules that
    nobody took.
    """

    def __init__(self, array: Any, versioned: bool, **changes: Any) -> None:
        self.array, self.versioned, self.changes = array, versioned, changes
        self.shape, self.dtype = array.shape, array.dtype
        self.made = self.freed = 0
        self.alive: set[int] = set()  # addresses
        self.kept: list[Any] = []  # what C code has pointers to

    def capsule(self) -> Any:
        memory = np.array(self.array)
        sizes = (ctypes.c_int64 * memory.ndim)(*memory.shape)
        managed: Any = (ManagedVersioned if self.versioned else Managed)()
        if self.versioned:
            managed.major, managed.minor = 1, 0
        code = {"i": 0, "u": 1, "f": 2}[memory.dtype.kind]
        tensor = DLTensor(memory.ctypes.data, 1, 0, memory.ndim, code, 8 * memory.itemsize, 1, sizes, None, 0)
        managed.tensor = tensor
        for name, value in self.changes.items():
            setattr(managed if hasattr(managed, name) else managed.tensor, name, value)
        address = ctypes.addressof(managed)

        def free(freed: int) -> None:
            assert freed == address
            self.alive.remove(address)  # a second time is a KeyError, which ctypes prints
            self.freed += 1
            memory.view(np.uint8).reshape(-1).fill(0x7F)

        def destroy(capsule: int) -> None:
            if _name_in_destructor(capsule) == NAMES[self.versioned]:
                free(address)

        managed.deleter = Deleter(free)
        destructor = Destructor(destroy)
        self.alive.add(address)
        self.kept.append((managed, sizes, memory, destructor))
        self.made += 1
        return api.PyCapsule_New(address, NAMES[self.versioned], ctypes.cast(destructor, ctypes.c_void_p))

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsule()


class Hoarder(Exporter):
    """Hands out one and the same capsule."""

    def __dlpack__(self, **options: Any) -> Any:
        if not hasattr(self, "only"):
            self.only = self.capsule()
        return self.only


@pytest.fixture(autouse=True)
def no_error_in_a_deleter(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert "Exception ignored" not in capfd.readouterr().err


def rows() -> Any:
    return np.random.default_rng(0).random((3, 4), np.float32)


@both_kinds
def test_a_capsule_is_freed_once_after_each_call(versioned: bool) -> None:
    attn = rows()
    exporter, expected = Exporter(attn, versioned), hopwell.normalize_l1(attn)
    for calls in range(1, 20):
        np.testing.assert_array_equal(hopwell.normalize_l1(exporter), expected)
        assert exporter.made == exporter.freed == calls


@both_kinds
def test_a_capsule_that_was_used_is_refused(versioned: bool) -> None:
    attn = rows()
    hoarder, expected = Hoarder(attn, versioned), hopwell.normalize_l1(attn)
    np.testing.assert_array_equal(hopwell.normalize_l1(hoarder), expected)
    assert api.PyCapsule_GetName(hoarder.only) == b"used_" + NAMES[versioned]
    for _ in range(20):
        message = "normalize_l1: attn must be an array with a new DLPack capsule for each call; got a capsule that was"
        with pytest.raises(ValueError, match=message):
            hopwell.normalize_l1(hoarder)
    del hoarder.only
    assert (hoarder.made, hoarder.freed) == (1, 1)


def attend(**arrays: Any) -> Any:
    rng = np.random.default_rng(0)
    call = {"q": rng.random((2, 1, 8), np.float32), "kv": rng.random((4, 8), np.float32)}
    call |= {"indices": np.array([[0, 1, 3], [2, 3, -1]], np.int32)}
    return hopwell.sparse_mla_forward(**call | arrays, sm_scale=0.3, d_v=8)


@both_kinds
def test_one_capsule_for_two_arguments(versioned: bool) -> None:
    lengths = Hoarder(np.array([1, 2], np.int32), versioned)
    with pytest.raises(ValueError, match="sparse_mla_forward: k_end must be an array with a new DLPack capsule"):
        attend(k_start=lengths, k_end=lengths)
    del lengths.only
    assert (lengths.made, lengths.freed) == (1, 1)


@both_kinds
def test_a_capsule_itself_is_an_array_once(versioned: bool) -> None:
    exporter = Exporter(np.array([2, 1], np.int32), versioned)
    capsule, expected = exporter.capsule(), attend(topk_length=exporter.array)
    for got, wanted in zip(attend(topk_length=capsule), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert exporter.freed == 1
    with pytest.raises(ValueError, match=r"sparse_mla_forward: topk_length must be .*; got a capsule that was used"):
        attend(topk_length=capsule)
    del capsule
    assert exporter.freed == 1


@both_kinds
def test_errors_of_later_arguments_free_what_was_taken(versioned: bool) -> None:
    wrong: dict[str, Any] = {
        "attn_sink": np.ones(5, np.float32),  # the operator's own check
        "topk_length": [1, 2],  # no array
        "k_start": np.ones(2, np.int32),  # without k_end
        "kv_stride": "one",
        "out": np.zeros((2, 1, 8)),
        "backend": "sm90",
    }
    for name, value in wrong.items():
        q, kv = Exporter(np.ones((2, 1, 8), np.float32), versioned), Exporter(np.ones((4, 8), np.float32), versioned)
        for calls in range(1, 4):
            with pytest.raises((ValueError, hopwell.Error), match="sparse_mla_forward: "):
                attend(q=q, kv=kv, **{name: value})
            assert q.made == q.freed == calls
            assert kv.made == kv.freed


@both_kinds
def test_capsules_that_do_not_fit(versioned: bool) -> None:
    """Taken or not, each is freed once."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ndim": 9}, "of at most 8 dimensions; got 9"),
        ({"ndim": -1}, "of at most 8 dimensions; got -1"),
        ({"bits": 64}, r"float32 \[rows, columns\]; got float64"),
        ({"device_type": 7}, ""),
    ]
    if versioned:
        wrong.append(({"major": 2}, "an array of DLPack's version 1; got version 2"))
    for changes, message in wrong:
        exporter = Exporter(rows(), versioned, **changes)
        for calls in (1, 2):
            with pytest.raises((ValueError, hopwell.Error), match=f"normalize_l1: .*{message}"):
                hopwell.normalize_l1(exporter)
            assert exporter.made == exporter.freed == calls


class Named(Exporter):
    def __dlpack__(self, **options: Any) -> Any:
        return api.PyCapsule_New(id(self), b"something", None)


def test_capsules_of_other_kinds() -> None:
    for other in (Named(rows(), False), api.PyCapsule_New(1, b"dltensor2", None), api.PyCapsule_New(1, None, None)):
        with pytest.raises(ValueError, match=r"sparse_mla_forward: kv must be an array \(torch, numpy, or anything"):
            attend(kv=other)


@both_kinds
def test_outputs(versioned: bool) -> None:
    """Written in place; what says that it must not be written, or that it is a copy, is refused."""
    attn, out = rows(), np.zeros((3, 4), np.float32)

    class InPlace(Exporter):
        def capsule(self) -> Any:
            self.changes["data"] = out.ctypes.data
            return super().capsule()

    exporter = InPlace(out, versioned)
    hopwell.normalize_l1(attn, out=exporter)
    np.testing.assert_array_equal(out, hopwell.normalize_l1(attn))
    assert exporter.made == exporter.freed == 1
    if versioned:
        for flags, message in (
            (1, "writable; got a read-only array"),
            (2, "an array that exports its own memory; got"),
        ):
            out.fill(7)
            exporter = InPlace(out, True, flags=flags)
            with pytest.raises(ValueError, match=f"normalize_l1: out must be {message}"):
                hopwell.normalize_l1(attn, out=exporter)
            assert exporter.made == exporter.freed == 1 and (out == 7).all()
            reader = Exporter(attn, True, flags=flags)
            np.testing.assert_array_equal(hopwell.normalize_l1(reader), hopwell.normalize_l1(attn))


@pytest.mark.parametrize("error", [TypeError, BufferError])
def test_exporters_of_one_kind_only(error: type[Exception]) -> None:
    class Old(Exporter):
        def __dlpack__(self, **options: Any) -> Any:
            if options:
                raise error("max_version")
            return super().__dlpack__()

    class New(Exporter):
        def __dlpack__(self, **options: Any) -> Any:
            assert options == {"max_version": (1, 0)}
            return super().__dlpack__()

    attn = rows()
    for exporter in (Old(attn, False), New(attn, True)):
        np.testing.assert_array_equal(hopwell.normalize_l1(exporter), hopwell.normalize_l1(attn))
        assert exporter.made == exporter.freed == 1


def test_an_interrupt_is_no_bad_argument() -> None:
    class Interrupted(Exporter):
        def __dlpack__(self, **options: Any) -> Any:
            raise KeyboardInterrupt

    taken = Exporter(np.ones((2, 1, 8), np.float32), True)
    with pytest.raises(KeyboardInterrupt):
        attend(q=taken, kv=Interrupted(rows(), True))
    assert taken.made == taken.freed == 1


@both_kinds
def test_capsules_that_are_never_taken(versioned: bool) -> None:
    exporter = Exporter(rows(), versioned)
    capsule = exporter.capsule()
    del capsule
    assert exporter.freed == 1


def test_types_that_no_operator_supports_have_names() -> None:
    torch = pytest.importorskip("torch")
    kv = torch.zeros(2, 576, dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"mla_cache_append: kv must be .*; got .*float8_e5m2"):
        hopwell.mla_cache_append(kv, np.zeros((1, 64, 656), np.uint8), np.arange(2))
