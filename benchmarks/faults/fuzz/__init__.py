"""Bytes that nobody meant: every kind of input the project reads, handed whatever a fuzzer finds.

A target is a function of bytes. It may return, or raise `UserError`; anything else is a fault, and
so is a process that is started, a module that is imported, an object that is unpickled, a file that
is touched outside the target's scratch folder, or a connection.
"""
