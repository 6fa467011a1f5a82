"""kvweave inside vLLM. `request` and `preparations` make what a client sends; vLLM loads the rest by the flags of `kvweave-vllm flags`.

Nothing here imports vLLM but what vLLM itself loads.
"""

from kvweave.remote.affinity import session_key as session_key
from kvweave_vllm.bodies import preparations as preparations
from kvweave_vllm.bodies import request as request
