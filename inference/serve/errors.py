"""Errors of the server in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

INVALID_REQUEST, RATE_LIMIT, SERVER = "invalid_request_error", "rate_limit_error", "server_error"


class ApiError(Exception):
    """A request that ends with an error.

    Args:
        status: HTTP status.
        message: One line that says what is wrong and what to do.
        kind: OpenAI's type of the error; by default that of a mistake in the request.
        param: Field of the request that the error is about.
        code: OpenAI's code of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object of the reply."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
