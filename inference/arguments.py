"""Arguments of the Python interface: of the types that their annotations name, or refused in one line."""

from collections.abc import Callable
from difflib import get_close_matches
from functools import cache, wraps
from inspect import signature
from reprlib import repr as short_repr
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from data.safe_text import safe_line

T = TypeVar("T", bound=Callable[..., Any])
LOWEST_TEMPERATURE = 1e-5  # of sampling; lower ones, by which logits would overflow, decode greedily, as in vLLM
STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


def plain(value: Any) -> Any:
    """Return the numbers and arrays of numpy and torch as Python's own, also those in a list or a tuple."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return value.tolist()
    return [plain(item) for item in value] if type(value) in (list, tuple) else value


def must_be(name: str, expected: str, value: object) -> ValueError:
    return ValueError(f"{name} must be {expected}, not {safe_line(short_repr(value))}")


def checks_arguments(function: T) -> T:
    """Let a function, or the constructor of a class, accept only what the annotations of its arguments allow.

    Numbers and arrays of numpy and torch count as Python's, and None means the default. Anything else raises ValueError
    with one line that names the argument; for an unknown one, it also names the nearest.
    """
    if isinstance(function, type):
        function.__init__ = checks_arguments(function.__init__)  # type: ignore[misc]
        return function
    signed = signature(function)
    parameters = {name: parameter for name, parameter in signed.parameters.items() if name != "self"}

    @cache
    def adapters() -> dict[str, TypeAdapter[Any]]:
        hints = get_type_hints(function, include_extras=True)
        return {name: TypeAdapter(hints[name], config=STRICT) for name in parameters if hints[name] is not Any}

    @wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        for name in (name for name in options if name not in parameters):
            raise ValueError(f"there is no option {name}: did you mean {get_close_matches(name, parameters, 1, 0)[0]}?")
        bound = signed.bind(*arguments, **options)
        for name in (name for name in adapters() if name in bound.arguments):
            value, default = plain(bound.arguments[name]), parameters[name].default
            value = default if value is None and default is not parameters[name].empty else value
            try:
                bound.arguments[name] = adapters()[name].validate_python(value)
            except ValidationError as error:
                messages = [details["msg"].removeprefix("Input should be ") for details in error.errors()]
                raise must_be(name, " or ".join(dict.fromkeys(messages)), value) from error
        return function(*bound.args, **bound.kwargs)

    return checked  # type: ignore[return-value]
