"""Pictures at URLs: what may be asked for, which addresses may be dialled, and the fetch itself."""
