"""eval: the commands under `kvweave eval`, gathered."""

from kvweave_lab.cli import eval_decode, evaluate, lookalikes, personas

app = evaluate.app
app.command("lookalikes")(lookalikes.lookalikes)
app.command("personas")(personas.personas)
app.command("decode")(eval_decode.decode)
