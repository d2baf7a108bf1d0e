"""Codecs: what is sent instead of raw fp32 numbers. The table needs no torch; the classes behind its rows do.

codec = codecs.parse("int8")
codec.size_bytes(1_000_000)          # exact, without torch: for prices and simulations
coder = codec.coder()                # encode and decode, on preallocated memory
payload = torch.empty(codec.size_bytes(len(values)), dtype=torch.uint8)
coder.encode(values, payload, residual)   # afterwards: decoded + residual = values + the residual before
coder.decode(payload, out)
"""

from offbeat.codecs.table import (
    ACROSS,
    BLOCK,
    CODECS,
    NONE,
    PER_TENSOR,
    PER_TRANSFER,
    Codec,
    CodecOption,
    CodecRow,
    add_row,
    all_reduce_figures,
    coding_s,
    gain,
    least_speed,
    most_bandwidth,
    parse,
    read_codec,
    read_option,
    read_rounding,
    split_place,
)

__all__ = [
    "ACROSS",
    "BLOCK",
    "CODECS",
    "NONE",
    "PER_TENSOR",
    "PER_TRANSFER",
    "Codec",
    "CodecOption",
    "CodecRow",
    "add_row",
    "all_reduce_figures",
    "coding_s",
    "gain",
    "least_speed",
    "most_bandwidth",
    "parse",
    "read_codec",
    "read_option",
    "read_rounding",
    "split_place",
]
