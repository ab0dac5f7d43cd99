from .reader import Network

__all__ = ["Network"]
