"""Adapters to other libraries; each module imports its library, the package itself imports none."""
