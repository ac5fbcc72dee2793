"""How an operator becomes a `torch.library` op, and what the files beside this share.

Kernels are put into PyTorch's dispatcher themselves, without `torch.library.custom_op`, whose checks of every result
cost more than the rest of a small call. Autograd's part of a call is Python too, so it is left out where gradients are
off.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, get_args, get_origin

import torch
from torch import Tensor

from hopwell._arrays import Array, ArrayT, DType
from hopwell._checks import require_one_device

P = ParamSpec("P")
R = TypeVar("R")
Named = dict[str, Any]  # arguments of a call, or values kept of it
Gradients = tuple[Tensor | None, ...]
NamedGradients = dict[str, Tensor | None]

_torch: Any = torch  # what is used of it here has no types
_forward_ad = _torch.autograd.forward_ad
_library = _torch.library.Library("hopwell", "DEF")
_c = _torch._C
_below_autograd = _c._AutoDispatchBelowAutograd


def operator(
    name: str, fake: Callable[..., Any], writes: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers a kernel and its fake as hopwell::<name>; the function that remains keeps the kernel's signature and
    docstring. One of `differentiable`, `stop_gradient` and `no_gradient` says what its backward is. A kernel that
    writes into arguments returns None.
    """

    def register(kernel: Callable[P, R]) -> Callable[P, R]:
        schema = torch.library.infer_schema(kernel, mutates_args=writes)
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            _library.impl(name, kernel, device)
        op = _op(name)
        names = dict.fromkeys(argument.name for argument in op._schema.arguments)
        torch.library.register_fake(f"hopwell::{name}", _on_one_device(op, fake), lib=_library)

        @functools.wraps(kernel)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R
            given: Any = args
            named: dict[str, Any] = kwargs
            if named.keys() == names.keys():  # PyTorch takes positional arguments faster
                given, named = [named[argument] for argument in names], {}
            try:
                if torch.is_grad_enabled() or _forward_ad._current_level >= 0 or torch.compiler.is_compiling():
                    result = op(*given, **named)
                else:
                    with _below_autograd():
                        result = op(*given, **named)
                return result
            except RuntimeError as error:
                if not str(error).startswith(f"hopwell::{name}() "):
                    raise
                refused = error  # by the dispatcher
            raise _as_hopwell_says(op, kernel, given, named, refused)

        return call

    return register


def arguments_of(
    function: Callable[..., Any], *without: str, **others: Any
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Gives a kernel, which takes `**given`, the arguments of an operator of `hopwell`, with their order and defaults.

    `without` names arguments that the op does not have: outputs, and what belongs to them. `others` are types of
    arguments that have another type in the op, or that only the op has; their default is None, or False.
    """
    parameters = dict(inspect.signature(function).parameters)
    for name in ("stream", *without):
        del parameters[name]
    backend = parameters.pop("backend")
    for name, kind in others.items():
        default = False if kind is bool else None
        known = parameters.get(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
        parameters[name] = known.replace(annotation=kind)
    parameters["backend"] = backend
    names = list(parameters)
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    arguments = [
        p.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_of_torch(p.annotation))
        for p in parameters.values()
    ]

    def take(kernel: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(kernel)
        def call(*args: Any, **kwargs: Any) -> R:
            given = dict(zip(names, args, strict=False))
            return kernel(**given) if len(given) == len(names) else kernel(**defaults | given | kwargs)

        result = inspect.signature(kernel).return_annotation
        call.__signature__ = inspect.Signature(arguments, return_annotation=result)  # type: ignore[attr-defined]
        return call

    return take


def tensor_or_number(argument: str, given: Named) -> Named:
    """The call's arguments for an op, where each has one type: a number moves to `<argument>_value`."""
    if isinstance(given[argument], Tensor):
        return given
    return given | {argument: None, argument + "_value": given[argument]}


def _of_torch(kind: Any) -> Any:
    """The type of an op's argument, for the type of an operator's argument."""
    if kind in (Array, ArrayT):
        return Tensor
    if kind is DType or get_origin(kind) is Literal:
        return str
    is_optional = type(None) in get_args(kind)
    return _of_torch(get_args(kind)[0]) | None if is_optional else kind


def _named(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of a call of the op, each with its name."""
    names = (argument.name for argument in op._schema.arguments)
    yield from zip(names, args, strict=False)
    yield from kwargs.items()


def _on_one_device(op: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake kernel that takes tensors of one device only, and all arguments by name. PyTorch calls a fake kernel if
    any tensor of a call is on meta. If the others are not, the caller would get a result that no kernel writes.
    """
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = dict(_named(op, args, kwargs))
        require_one_device(op._opname, **given)
        return fake(**defaults | given)

    return checked


def _as_hopwell_says(
    op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], refused: RuntimeError
) -> Exception:
    """The error for arguments that PyTorch's dispatcher does not take, such as an integer of more than 64 bits, which
    it says is no integer.
    """
    for argument, value in _named(op, args, kwargs):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return ValueError(f"{op._opname}: {argument} must be an integer of 64 bits; got {value}")
    try:
        with torch.no_grad():
            kernel(*args, **kwargs)
    except ValueError as error:
        return error
    except Exception:  # an array of another framework, on which the kernel cannot run
        pass
    return refused


def differentiable(
    name: str,
    backward: Callable[..., NamedGradients],
    save: Callable[[Named, Any], Named] = lambda *_: {},
    constants: tuple[int, ...] = (),
) -> None:
    """Gives hopwell::<name> its gradients, which have none themselves.

    `save` takes the arguments by name and the result, and returns what the backward needs. `backward` takes that, the
    names of the arguments that need a gradient, and the gradients of the results; it returns gradients by name.
    `constants` are the results that have none.
    """
    op, torch_autograd = _op(name), torch._library.autograd
    names = [argument.name for argument in op._schema.arguments]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*(output[i] for i in constants))
        ctx.kept = save(dict(zip(names, inputs, strict=True)), output)
        ctx.tensors = [key for key, value in ctx.kept.items() if isinstance(value, Tensor)]
        ctx.save_for_backward(*(ctx.kept.pop(key) for key in ctx.tensors))

    def once(ctx: Any, *d_outputs: Tensor) -> Gradients:
        refuse_second_derivative(f"hopwell::{name}")
        kept = ctx.kept | dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))
        needs = zip(names, ctx.needs_input_grad, strict=False)  # PyTorch omits trailing defaults
        gradients = backward(kept, {key for key, need in needs if need}, *d_outputs)
        return tuple(map(gradients.get, names))

    record = torch_autograd.make_autograd_impl(op, torch_autograd.Info(once, keep))

    def autograd(keyset: Any, *args: Any) -> Any:
        if _forward_ad._current_level >= 0 or _c._are_functorch_transforms_active():
            _refuse_transforms(name, args)
        if torch.is_grad_enabled() and _c._any_requires_grad(*args):
            return record(keyset, *args)
        with _below_autograd():
            return op.redispatch(keyset & _c._after_autograd_keyset, *args)

    _library.impl(name, autograd, "Autograd", with_keyset=True)


def refuse_second_derivative(what: str) -> None:
    """In a backward: its gradients would be constants, and second derivatives too small in silence."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} has no second derivative: it can't run with create_graph=True")


def stop_gradient(name: str) -> None:
    """Declares that no gradient passes through hopwell::<name>: its results are constants."""
    op = _op(name)

    def constant(keyset: Any, *args: Any) -> Any:
        with _below_autograd():
            return op.redispatch(keyset & _c._after_autograd_keyset, *args)

    _library.impl(name, constant, "Autograd", with_keyset=True)


def no_gradient(name: str) -> None:
    """Declares that hopwell::<name> has no gradient: a backward that comes to it is an error."""

    def refuse(*_: Any) -> NoReturn:
        raise RuntimeError(f"hopwell::{name} has no gradient")

    differentiable(name, refuse)


def _op(name: str) -> Any:
    return getattr(torch.ops.hopwell, name).default


def _refuse_transforms(name: str, args: tuple[Any, ...]) -> None:
    """Forward mode would take the operator's results for constants; torch.func's reverse mode does not know it."""
    if any(isinstance(a, Tensor) and _forward_ad.unpack_dual(a).tangent is not None for a in args):
        raise RuntimeError(f"hopwell::{name} has no forward-mode derivative")
    if _c._are_functorch_transforms_active() and torch.is_grad_enabled() and _c._any_requires_grad(*args):
        raise RuntimeError(f"hopwell::{name} has no gradient in torch.func.grad and its like: use torch.autograd.grad")


def exporting(function: Callable[P, R]) -> Callable[P, R]:
    """An operator of `hopwell` for a kernel, below autograd. PyTorch before 2.10 exports no tensor that requires
    gradients, nor all dtypes.
    """
    if hasattr(Tensor, "__dlpack_c_exchange_api__"):
        return function

    def exportable(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        is_codes = argument.dtype in (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
        return argument.detach().view(torch.uint8) if is_codes else argument.detach()

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*map(exportable, args), **{name: exportable(value) for name, value in kwargs.items()})

    return call


def contiguous_rows(gradient: Tensor) -> Tensor:
    """What autograd gives may have any strides, such as the gradient of a sum, one number expanded; an operator takes a
    contiguous last dimension.
    """
    return gradient if gradient.stride(-1) == 1 else gradient.contiguous()


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """The gradient times a 0-d factor, rounded once: in the gradient's dtype the factor itself might be 0.4 % off."""
    return torch.mul(gradient, factor.float().reshape(1), out=torch.empty_like(gradient))


def scale_shape(rows: int, k: int, scale_layout: str) -> tuple[int, int]:
    """Shape of the scales of a [rows, k] matrix; the blocked layout pads to whole 128 × 4 blocks."""
    if scale_layout == "blocked":
        return -(-rows // 128) * 128, -(-k // 64) * 4
    return rows, k // 16
