"""GET / and /static: the web page, with headers that let it run its own files alone."""

from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

PAGE: Final = Path(str(files("kvweave.server"))) / "page"
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks whether a file has changed: an update of kvweave shows at once
}


class PageFiles(StaticFiles):
    """The page's files."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return a file with the page's headers, or that it has not changed."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


def mount_page(app: FastAPI) -> None:
    """Serve the page of this package."""
    app.mount("/static", PageFiles(directory=PAGE), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=HEADERS)
