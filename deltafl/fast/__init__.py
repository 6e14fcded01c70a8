"""The same client, faster: what `client.train` computes, up to rounding.

`stacked` trains many small clients at once, `flat` spares a larger one the optimizer's overhead.
The plain path is the reference of both.
"""
