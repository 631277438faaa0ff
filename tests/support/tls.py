"""A certificate for localhost and its key, made for tests alone: nobody trusts it, and it guards nothing."""

from pathlib import Path

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBmjCCAUGgAwIBAgIUbrLdmHNly/EUEQF5mhg44xT4gBUwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyOTIzMjUxNloYDzIxMjYxMTA1
MjMyNTE2WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASqnMV6nwGtqA2Kem7z43xQjXmtvYugTSStRC/6v3XBA9/g4VWg0wai
e8vH53Fih353Tx8Ym+bHl0QSA+KFE7qao28wbTAdBgNVHQ4EFgQUJf43dZ4GZuuj
IK4z1FNL+YoUOjwwHwYDVR0jBBgwFoAUJf43dZ4GZuujIK4z1FNL+YoUOjwwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDRwAwRAIgAN2xcbjghZNTUDDDnghT7mN1X+a7gzz6lLJfzV7r5XUCIFf4
xTAAH2s2pCCEFMGQIu7qLWCcu8ByinKMBfJ9ekWA
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgTQfAeKqbDnaXwCGR
9R0KDhqvBC+++/E2RW41C9nqH2uhRANCAASqnMV6nwGtqA2Kem7z43xQjXmtvYug
TSStRC/6v3XBA9/g4VWg0waie8vH53Fih353Tx8Ym+bHl0QSA+KFE7qa
-----END PRIVATE KEY-----
"""
KEY_WITH_PASSPHRASE = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAg7WKmTYQK6LgICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEKkKJljNauzhw1rpbsjEzC4EgZAA
IN+OqeN3CNkAPX8akaxr5vZR6vX9yA9UWce4Qjw+S8BkByHdbeFsiqSp6kQV8Z36
2BXA9oXcXn7b60EG8qOhe6TOv73zXe5zD9pku9LphhZJjxzdlDujHrEVqmqJt44M
l5wshXZFy4BLtmCNkFj+6tjVq9KLKC+mRMfWNjzDmUTKpHDjlTS2dUBeCWnMc3s=
-----END ENCRYPTED PRIVATE KEY-----
"""


def write(folder: Path, key: str = KEY) -> tuple[str, str]:
    """The files of certificate and key."""
    (folder / "cert.pem").write_text(CERTIFICATE)
    (folder / "key.pem").write_text(key)
    return str(folder / "cert.pem"), str(folder / "key.pem")
