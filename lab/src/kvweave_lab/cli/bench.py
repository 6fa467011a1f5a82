"""bench: speed, measured here and now."""

import typer

from kvweave_lab.cli import bench_decode, bench_reuse, bench_steady, bench_store, bench_ttft

app = typer.Typer(
    help="Measure speed on this machine; every figure is one thing beside another.", no_args_is_help=True
)
app.command("ttft")(bench_ttft.ttft)
app.command("steady")(bench_steady.steady)
app.command("store")(bench_store.store)
app.command("decode")(bench_decode.decode)
app.command("reuse")(bench_reuse.reuse)


@app.callback()
def _root() -> None:
    """Measure speed on this machine; every figure is one thing beside another."""
