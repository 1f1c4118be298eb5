"""Formats of JSON schemas as expressions, which match a text from its beginning to its end."""

_DAY = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
DATE = (
    f"(?:(?:[1-9][0-9]{{3}}|0[1-9][0-9]{{2}}|00[1-9][0-9]|000[1-9])-{_DAY}|02-(?:0[1-9]|1[0-9]|"
    "2[0-8]))|(?:(?:0[48]|[2468][048]|[13579][26])00|[0-9]{2}(?:0[48]|[2468][048]|[13579][26]))"
    "-02-29)"
)
TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
_IN_PATH = "A-Za-z0-9._~!$&'()*+,;=:@-"
_PATH = f"[/{_IN_PATH}]"
_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_POINTER = "(?:/[A-Za-z0-9_.-]*)*"
# Each describes a part of the format, large enough to write any sensible value.
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": "P(?:[0-9]{1,4}W|[0-9]{1,4}D(?:T[0-9]{1,4}H)?|T[0-9]{1,4}[HMS]|[0-9]{1,4}[YM])",
    "email": f"[A-Za-z0-9_+-]{{1,30}}(?:\\.[A-Za-z0-9_+-]{{1,30}})?@{_LABEL}(?:\\.{_LABEL}){{1,3}}",
    "hostname": f"{_LABEL}(?:\\.{_LABEL}){{0,4}}",
    "ipv4": "(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\\.){3}"
    "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    "ipv6": "[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}",
    "uuid": _UUID,
    "uri": f"[a-z]{{2,10}}://{_LABEL}(?:\\.{_LABEL}){{0,4}}(?:/{_PATH}*)?",
    "uri-reference": f"/(?:[{_IN_PATH}]{_PATH}*)?",  # behind two slashes a host would have to be
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*){_POINTER}",
}
FORMATS |= {"idn-email": FORMATS["email"], "idn-hostname": FORMATS["hostname"]}
FORMATS |= {"iri": FORMATS["uri"], "iri-reference": FORMATS["uri-reference"]}
FORMATS |= {"uri-template": FORMATS["uri-reference"]}
UNCHECKED_FORMATS = {"regex"}  # no expression says which texts are expressions
