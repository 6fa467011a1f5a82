"""How far one distribution is from another."""

from torch import Tensor


def divergence(truth: Tensor, other: Tensor) -> float:
    """KL(truth ‖ other) of two distributions given as logits (…, n), in nats, never below 0."""
    p, q = (logits.double().log_softmax(-1) for logits in (truth, other))
    return max(0.0, float((p.exp() * (p - q)).sum()))
