"""Gradient reduction: low-precision codes on the wire, sums in FP32."""
