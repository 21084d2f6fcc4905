//! How far the names that stand inside images may lead (F2).
//!
//! The operator allows folders; what an image names is anybody's word. Nothing is opened for reading,
//! locked or woken before it is judged, and what is opened is what was judged:
//!
//! 1. The folder in which the name stands must lie within reach once its symlinks are resolved. The
//!    names inside the next image are judged from there, so a chain never gets further than its
//!    first image could.
//! 2. The name is opened as a mere place (`O_PATH`), which starts no device and waits for no pipe. The
//!    kernel tells where that place lies, symlinks resolved, and it must lie within reach as well.
//! 3. That very place is opened, through `/proc/self/fd`: whatever the name leads to by then, a
//!    swapped symlink included, no longer matters.
//!
//! Deliberately absent: names that the operator gives (they are followed anywhere), and telling hard
//! links apart: whoever can make one in a folder is trusted with that folder.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use stillpoint_io::{Error, Kind, Result};

/// Which files a name inside an image may open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// Regular files in the folder of the image that names them, and below.
    #[default]
    Beside,
    /// Those, and regular files and block devices in these folders and below; see [`Reach::folders`].
    Folders(Arc<[PathBuf]>),
    /// Whatever the process may open.
    Anywhere,
}

impl Reach {
    /// Adds `folders` to the image's own; `/` is [`Reach::Anywhere`], none is [`Reach::Beside`].
    ///
    /// # Errors
    /// If one of them is not a folder that is there.
    pub fn folders(folders: &[PathBuf]) -> Result<Reach> {
        const OP: &str = "allow backing files from there";
        let mut resolved = Vec::new();
        for folder in folders {
            let failed = |error| Error::from_std(OP, &error).file(folder.display());
            let place = folder.canonicalize().map_err(failed)?;
            if !place.is_dir() {
                let error = Error::new(Kind::Invalid, OP, "it is not a folder");
                return Err(error.file(folder.display()).remedy("name the folder that holds them"));
            }
            resolved.push(place);
        }
        Ok(if resolved.iter().any(|place| place == Path::new("/")) {
            Reach::Anywhere
        } else if resolved.is_empty() {
            Reach::Beside
        } else {
            Reach::Folders(resolved.into())
        })
    }

    /// Finds what the image `beside` names by `path`, if that lies within reach. `None`: no judgement
    /// is needed, and the path may be opened as it is.
    pub(crate) fn find(&self, path: &Path, beside: &str) -> Result<Option<Place>> {
        if *self == Reach::Anywhere {
            return Ok(None);
        }
        let home = resolved_folder(Path::new(beside))?;
        let folder = resolved_folder(path)?;
        if !self.holds(&home, &folder) {
            let place = folder.join(path.file_name().unwrap_or_default());
            return Err(self.refusal(beside, &home, &place));
        }
        let found = Place::find(path)?;
        if !self.holds(&home, &found.path) {
            return Err(self.refusal(beside, &home, &found.path));
        }
        // A device is no file beside the image, wherever its node stands.
        if found.kind.is_block_device() && !self.lists(&found.path) {
            let why = format!("{} is a block device", found.path.display());
            return Err(refuse(beside, why, &found.path));
        }
        Ok(Some(found))
    }

    /// Whether a place lies within reach of an image in the folder `home`.
    fn holds(&self, home: &Path, place: &Path) -> bool {
        place.starts_with(home) || self.lists(place)
    }

    /// Whether a place lies in a folder that the operator has listed.
    fn lists(&self, place: &Path) -> bool {
        match self {
            Reach::Beside => false,
            Reach::Folders(folders) => folders.iter().any(|folder| place.starts_with(folder)),
            Reach::Anywhere => true,
        }
    }

    fn refusal(&self, beside: &str, home: &Path, place: &Path) -> Error {
        let (place_name, home) = (place.display(), home.display());
        let mut why =
            format!("{place_name} lies outside {home}, the folder of the image that names it");
        if let Reach::Folders(_) = self {
            why.push_str(", and outside the folders allowed besides");
        }
        refuse(beside, why, place)
    }
}

fn refuse(beside: &str, why: String, place: &Path) -> Error {
    let folder = place.parent().unwrap_or(place).display();
    Error::new(Kind::Permission, "open the backing file", why)
        .file(beside)
        .remedy(format!("allow it with --backing-from {folder}"))
}

/// A file that was found, and not opened yet.
#[derive(Debug)]
pub(crate) struct Place {
    fd: OwnedFd,
    path: PathBuf,
    kind: FileType,
}

impl Place {
    fn find(path: &Path) -> Result<Place> {
        let failed = |errno: Errno| {
            Error::from_errno("open the file", errno.raw_os_error()).file(path.display())
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd).map_err(failed)?.st_mode);
        let path = std::fs::read_link(link_to(&fd)).map_err(|error| {
            Error::from_std("find out where the file lies", &error)
                .file(path.display())
                .remedy("mount /proc, or allow files from anywhere with --backing-from /")
        })?;
        Ok(Place { fd, path, kind })
    }

    /// Where the very file can be opened, while `self` lives.
    pub(crate) fn link(&self) -> PathBuf {
        link_to(&self.fd)
    }
}

fn link_to(fd: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()).into()
}

/// The folder in which the file called `path` stands, symlinks resolved.
fn resolved_folder(path: &Path) -> Result<PathBuf> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    folder
        .canonicalize()
        .map_err(|error| Error::from_std("open the file", &error).file(path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reach_is_judged_by_whole_names() {
        let folders = Reach::Folders([PathBuf::from("/base"), PathBuf::from("/pool/a")].into());
        for (reach, place, expected) in [
            (&Reach::Beside, "/vm/a", true),
            (&Reach::Beside, "/vm/sub/a", true),
            (&Reach::Beside, "/vm", true),
            (&Reach::Beside, "/vmx/a", false),
            (&Reach::Beside, "/base/a", false),
            (&Reach::Beside, "(unreachable)/vm/a", false),
            (&folders, "/vm/a", true),
            (&folders, "/base/x/a", true),
            (&folders, "/pool/ab", false),
            (&folders, "/etc/passwd", false),
            (&Reach::Anywhere, "/etc/passwd", true),
        ] {
            assert_eq!(reach.holds(Path::new("/vm"), Path::new(place)), expected, "{place}");
        }
    }

    #[test]
    fn folders_are_resolved_and_must_be_there() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().canonicalize().unwrap();
        std::os::unix::fs::symlink(&real, real.join("link")).unwrap();
        std::fs::write(real.join("file"), "").unwrap();
        assert_eq!(Reach::folders(&[]).unwrap(), Reach::Beside);
        assert_eq!(Reach::folders(&["/".into()]).unwrap(), Reach::Anywhere);
        let through = Reach::folders(&[real.join("link")]).unwrap();
        assert_eq!(through, Reach::Folders([real.clone()].into()));
        let file = Reach::folders(&[real.join("file")]).unwrap_err();
        assert_eq!(file.kind(), Kind::Invalid);
        let missing = Reach::folders(&[real.join("missing")]).unwrap_err();
        assert_eq!(missing.kind(), Kind::NotFound);
    }

    #[test]
    fn what_is_opened_is_what_was_judged() {
        let folder = tempfile::tempdir().unwrap();
        let (image, base) = (folder.path().join("vm/a"), folder.path().join("vm/base"));
        std::fs::create_dir(folder.path().join("vm")).unwrap();
        std::fs::write(&base, "base").unwrap();
        std::fs::write(folder.path().join("secret"), "secret").unwrap();
        let place = Reach::Beside.find(&base, image.to_str().unwrap()).unwrap().unwrap();
        // Between judging and opening.
        std::fs::remove_file(&base).unwrap();
        std::os::unix::fs::symlink("../secret", &base).unwrap();
        assert_eq!(std::fs::read_to_string(&base).unwrap(), "secret");
        assert_eq!(std::fs::read_to_string(place.link()).unwrap(), "base");
    }
}
