"""The errors this project raises on purpose, and when to raise which.

`ValueError` says that the arguments contradict each other or name nothing;
`NotImplementedError` says that a request is legal and not covered here. Both
are Python's own and need no definition. Two more situations deserve a type,
because the experiment binaries turn them into exit codes.

Layer: contracts. Imports nothing from this project.
"""


class HarnessError(Exception):
  """The input or the harness is at fault; nothing was compared. Exit code 2.

  Raised for files that are missing, damaged or of the wrong kind. The message
  names the file and the offending values.
  """


class UnsupportedError(Exception):
  """The comparison is legal and this project cannot make it. Exit code 4.

  Raised, for example, when a reference runs an operation whose arithmetic is
  not known here: guessing it would make the verdict worthless.
  """
