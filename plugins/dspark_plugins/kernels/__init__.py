"""The device operations in the Triton language.

A kernel file holds device code and the shapes it is compiled for; the typed launchers in `ops` choose them. This folder
imports the Triton language and torch, nothing of ours but itself.
"""
