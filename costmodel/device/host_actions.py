"""The actions of a step that take time of the host beside the kernels, where the host computes.

`autopar calibrate` measures the seconds of each on the runtime itself. A device without such
figures has none: its host runs ahead, or nobody has measured it.
"""

from __future__ import annotations

from collections.abc import Mapping

HOST_ACTIONS: Mapping[str, str] = {
    "step": "a call of the module with its backward pass",
    "pass": "a pass of a segment, forward or backward",
    "operator": "an operator in a pass, beside its launch",
    "collective": "a collective, beside the message itself",
    "gradient": "a trained parameter in a backward pass, whose gradient is taken and added",
    "unit": "a parameter in a round of gathering or reducing its unit",
    "message": "a message between stages, at both ends",
    "update": "a trained parameter in a step, which is updated",
}
"""Names of the actions, each with what its seconds are of."""
