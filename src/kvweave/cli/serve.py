"""serve: answer over HTTP, with OpenAI's API and routes for knowledge bases."""

from typing import Any, Final

import typer

from kvweave.cli import options as opt
from kvweave.cli.setting_options import setting_options, values

SHARED: Final = (
    *opt.KB,
    *opt.MODEL,
    "embedding_model",
    *("chunk_tokens", "overlap_tokens", "system"),
    *opt.REUSE,
    "top_k",
    "reranker",
    *("max_new_tokens", "temperature", "think"),
    *opt.OFFLOADING,
    "prediction_stride",
)
OtherSettings: Any = setting_options(without=SHARED)


@opt.with_options(
    *SHARED, kb="Take the model and the embedding model that this knowledge base was made with."
)
def serve(*, options: opt.SharedOptions, settings: OtherSettings) -> None:
    """Serve questions over HTTP, with OpenAI's API, a page at / and metrics. Ends on SIGTERM or Ctrl-C."""
    config = options.config(**values(settings), top_k=options.top_k)
    opt.quiet_libraries()
    try:
        from kvweave.server.process.serve import serve as run
    except ImportError as error:
        from kvweave.errors import MissingExtra

        raise MissingExtra("`kvweave serve` needs the extra: pip install 'kvweave[serve]'") from error
    from kvweave.engine.recorded_models import with_recorded_models

    run(with_recorded_models(config, options.kb), typer.echo)
