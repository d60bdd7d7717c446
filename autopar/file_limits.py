"""Upper limits for files from strangers.

Anything larger is refused before it costs memory or time.
"""

from __future__ import annotations

MIB = 2**20
PLAN_BYTES = 256 * MIB
"""A plan file; a plan of 100,000 operators takes some 80 MiB."""
CLUSTER_BYTES = 1 * MIB
"""A cluster file."""
CONFIGURATION_BYTES = 4 * MIB
"""A configuration of another project, and a Hugging Face configuration."""
ROUTING_BYTES = 16 * MIB
"""Counts of rows by expert and layer."""
LAYERS = 4096
"""Layers of experts for which a file gives counts."""
EXPERTS = 65536
"""Experts of a layer in it."""
ROWS = 2**53
"""Rows of an expert in it: floats hold all whole numbers up to here."""
STRATEGY_BYTES = 64 * MIB
"""A strategy checkpoint of MindSpore."""
NAME_BYTES = 4096
"""A file that holds one name."""
TRACE_BYTES = 512 * MIB
"""A measurement: a trace of torch.profiler grows by some 10 MiB a step."""
HEADER_BYTES = 100_000_000
"""The header of a safetensors file: the limit of the format's own reader."""
GRAPH_NODES = 200_000
"""Nodes of an ONNX model after all local functions are inlined."""
GRAPH_BYTES = 2**31
"""Bytes of that model: protobuf cannot serialize a message of 2 GiB or more."""
GRAPH_DEPTH = 200
"""Local functions that call one another in a row."""
FOLDED_ELEMENTS = 2**20
"""Elements of a constant that is computed while a model is read; larger values stay operators."""
TENSOR_BYTES = 2**60
"""All tensors of a model together: sums of a few times as many are still whole numbers of 64 bits.
"""
ARCHIVE_ENTRIES = 1_000_000
"""Files and values of a `.pt2` archive."""
MICRO_BATCHES = 2**16
"""Micro-batches of a step: the order of a stage is written out, with a letter for each pass."""
RANKS = 512
"""Ranks that `autopar run` starts on one machine, each a process."""
DEGREE = 2**31
"""A degree of parallelism, or a size, in a configuration."""
