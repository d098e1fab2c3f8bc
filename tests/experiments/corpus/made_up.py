"""Packages made up for the tests: .deb files, and folders of the same."""

import io
import pathlib
import tarfile
import tempfile
import unittest

NOTICE = b"""Format: https://www.debian.org/doc/copyright-format/1.0/

Files: *
Copyright: 2001-2003 A. Writer <writer@example.org>
License: GPL-2+
"""
_EN = (
    "the a this every some one any each first last quick slow small large old"
    " new clear plain server disk folder user name file system package kernel"
    " process reads writes starts stops keeps moves shows prints checks holds"
    " and or when while before after with without under over near"
).split()
_ZH = (
    "系统文件用户目录命令内核进程磁盘网络"
    "服务程序数据库配置安装更新删除显示打印检查"
)


def folder(test: unittest.TestCase) -> pathlib.Path:
  """Returns a folder that lasts as long as the test."""
  return pathlib.Path(test.enterContext(tempfile.TemporaryDirectory()))


def english(rng, words: int) -> str:
  """Returns a sentence of English words without sense."""
  return " ".join(rng.choice(_EN) for _ in range(words)).capitalize() + "."


def chinese(rng, characters: int) -> str:
  """Returns a sentence of Chinese characters without sense."""
  return "".join(rng.choice(_ZH) for _ in range(characters)) + "。"


def page(rng, language: str, paragraphs: int = 6) -> bytes:
  """Returns an HTML page of random sentences."""
  make, size = (english, 22) if language == "en" else (chinese, 44)
  body = "".join(f"<p>{make(rng, size)}</p>" for _ in range(paragraphs))
  return f"<html><body><h1>1. 标题 Title</h1>{body}</body></html>".replace(
      "标题 Title", "Title" if language == "en" else "标题"
  ).encode()


def files(rng, name: str, language: str, pages: int) -> dict[str, bytes]:
  """Returns {path: content} of a package of HTML pages."""
  docs = f"usr/share/doc/{name}"
  return {
      f"{docs}/copyright": NOTICE,
      **{
          f"{docs}/html/ch{i:02}.html": page(rng, language)
          for i in range(pages)
      },
  }


def deb(
    place: pathlib.Path,
    name: str,
    content: dict[str, bytes],
    *,
    version: str = "1.0-1",
    links: dict[str, str] | None = None,
    compression: str = "xz",
) -> pathlib.Path:
  """Writes a .deb and returns its path."""
  control = f"Package: {name}\nVersion: {version}\n".encode()
  members = {
      "debian-binary": b"2.0\n",
      f"control.tar.{compression}": _tar({"control": control}, {}, compression),
      f"data.tar.{compression}": _tar(content, links or {}, compression),
  }
  data = b"!<arch>\n"
  for member, body in members.items():
    data += (
        f"{member:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(body):<10}`\n"
        .encode()
    )
    data += body + b"\n" * (len(body) % 2)
  path = place / f"{name}_{version}_all.deb"
  path.write_bytes(data)
  return path


def unpacked(
    place: pathlib.Path, name: str, content: dict[str, bytes]
) -> pathlib.Path:
  """Writes a package as `dpkg-deb -R` would leave it."""
  control = f"Package: {name}\nVersion: 1.0-1\n".encode()
  for path, body in {"DEBIAN/control": control, **content}.items():
    target = place / name / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(body)
  return place / name


def _tar(content, links, compression: str) -> bytes:
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode=f"w:{compression}") as tar:
    for path, body in content.items():
      info = tarfile.TarInfo(f"./{path}")
      info.size = len(body)
      tar.addfile(info, io.BytesIO(body))
    for path, target in links.items():
      info = tarfile.TarInfo(f"./{path}")
      info.type, info.linkname = tarfile.SYMTYPE, target
      tar.addfile(info)
  return buffer.getvalue()
