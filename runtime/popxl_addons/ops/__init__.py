"""Ops of the add-ons: compositions of PopXL's, or PopXL's with another gradient. One file each, imported explicitly."""
