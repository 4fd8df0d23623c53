"""What every reply tells browsers: not to guess types, keep, frame, embed, or name where a visitor comes from."""

from __future__ import annotations

SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),  # features of somebody's pictures
    (b"content-security-policy", b"frame-ancestors 'none'"),  # pages add what they need: a browser obeys both
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]
