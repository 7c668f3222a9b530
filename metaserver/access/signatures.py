"""Verifies signatures of JSON Web Tokens with the library joserfc.

The module is separate from `jwt.py` because joserfc is large, and servers without logins do not need to import it.
"""

from __future__ import annotations

import sys

from joserfc import jws
from joserfc.errors import JoseError, UnsupportedAlgorithmError
from joserfc.jwa import JWSAlgModel
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

Key = RSAKey | ECKey | OKPKey | OctKey


class _Registry(jws.JWSRegistry):
    """joserfc's checks for one algorithm.

    The registry accepts long headers (x5c) and unknown header fields, because issuers send them. Tokens with a `crit`
    header were already refused.
    """

    max_header_length = 8 * 1024
    max_payload_length = sys.maxsize  # `jwt.parse_token` limits the length of tokens.

    def __init__(self, algorithm: str) -> None:
        super().__init__(algorithms=[algorithm], strict_check_header=False)
        self._only_algorithm = algorithm

    def get_alg(self, name: str) -> JWSAlgModel:
        # Do not call the base class, which warns about EdDSA, the old name (RFC 9864) that issuers use.
        if name != self._only_algorithm:
            raise UnsupportedAlgorithmError(f"{name} instead of {self._only_algorithm}")
        return self.algorithms[name]


_REGISTRIES = {name: _Registry(name) for name in ("RS256", "ES256", "EdDSA", "Ed25519", "HS256")}


def is_signature_valid(token: str, key: Key, algorithm: str) -> bool:
    """Return whether the token was signed with this key and algorithm."""
    try:
        jws.deserialize_compact(token, key, registry=_REGISTRIES[algorithm])
    except (JoseError, ValueError, TypeError):
        return False
    return True
