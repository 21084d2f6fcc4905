//! qemu-img's verbs: their command lines, their texts and their exit codes.
//!
//! | file | what it holds |
//! |---|---|
//! | [`create`], [`create_options`] | `create`, and what `-o` may say |
//! | [`info`] | `info` |
//! | [`check`] | `check` |
//! | [`map`] | `map` |
//! | [`text`] | sizes, JSON and errors as qemu-img prints them |
//!
//! Scripts read what is printed here: the words are qemu-img's on purpose. Errors are in its words
//! where the program speaks as `qemu-img` (see [`Tool`]), and in ours, with place and remedy, elsewhere.
//!
//! Deliberately absent: anything that looks into an image; that is the engine's.

pub mod check;
pub mod create;
mod create_options;
pub mod info;
pub mod map;
mod text;

use clap::{Args, ValueEnum};
use stillpoint_engine::ImageFormat;
use stillpoint_engine::offline::image::format_by_name;
use stillpoint_host::{Aio, Cache, HostFiles, LoopOptions, Reach};
use stillpoint_io::{Access, Error, Kind, Queue, Result};

use crate::Tool;

/// How results are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people
    #[default]
    Human,
    /// For programs
    Json,
}

/// Which image, and how it is opened.
#[derive(Args, Clone, Debug)]
pub struct ImageArgs {
    /// The image's format, raw or qcow2; probed unless it is given
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,

    /// IMAGE is not a file's name but options: driver=FMT,file.filename=NAME
    #[arg(long, conflicts_with = "format")]
    image_opts: bool,

    /// Open the image even while somebody else writes to it
    #[arg(short = 'U', long)]
    force_share: bool,

    /// The image
    #[arg(value_name = "IMAGE")]
    names: Vec<String>,
}

/// An image as the user means it.
#[derive(Clone, Debug)]
struct Target {
    name: String,
    format: Option<ImageFormat>,
    access: Access,
}

impl ImageArgs {
    /// The one image that is meant, for reading.
    fn target(&self) -> Result<Target> {
        let [name] = &self.names[..] else {
            return Err(invalid("Expecting one image file name"));
        };
        let access = if self.force_share { Access::ReadUnlocked } else { Access::Read };
        if self.image_opts {
            return parse_image_options(name, access);
        }
        let format = self.format.as_deref().map(format_by_name).transpose();
        Ok(Target { name: name.clone(), format: format.map_err(|e| e.file(name))?, access })
    }
}

fn invalid(why: impl Into<String>) -> Error {
    Error::new(Kind::Invalid, "understand the command line", why)
}

/// Splits `key=value,key=value` at single commas; a doubled comma stands for one in a value.
fn split_options(text: &str) -> Vec<(String, Option<String>)> {
    let mut pairs = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let mut item = String::new();
        loop {
            let (head, tail) = rest.split_once(',').unwrap_or((rest, ""));
            item.push_str(head);
            match tail.strip_prefix(',') {
                Some(tail) => {
                    item.push(',');
                    rest = tail;
                }
                None => {
                    rest = tail;
                    break;
                }
            }
        }
        pairs.push(match item.split_once('=') {
            Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
            None => (item, None),
        });
    }
    pairs
}

/// The options that `--image-opts` knows; every other is refused by name.
fn parse_image_options(text: &str, access: Access) -> Result<Target> {
    let mut target = Target { name: String::new(), format: None, access };
    for (key, value) in split_options(text) {
        let value = value.unwrap_or_else(|| "on".to_owned());
        match (&key[..], &value[..]) {
            ("driver", _) => target.format = Some(format_by_name(&value)?),
            ("file.filename" | "filename", _) => target.name = value,
            ("file.driver", "file") => {}
            ("force-share" | "file.force-share", "on") => target.access = Access::ReadUnlocked,
            _ => return Err(invalid(format!("the image option {key}={value} is not supported"))),
        }
    }
    if target.name.is_empty() {
        return Err(invalid("the image options name no file (file.filename=NAME)"));
    }
    Ok(target)
}

/// Runs a verb on an event loop. Most go through the page cache: offline work gains from it, and
/// other tools look at the same files right afterwards. Where io_uring is forbidden threads do as
/// well.
fn run_on_loop<T>(cache: Cache, main: impl AsyncFn(Queue, HostFiles) -> T) -> Result<T> {
    let run = |aio| {
        // Called by hand on images that the caller chose, as qemu-img is: names lead anywhere.
        let files = HostFiles::new(aio, cache).reaching(Reach::Anywhere);
        let options = LoopOptions { aio, ..LoopOptions::default() };
        stillpoint_host::run(options, async |queue| main(queue, files).await)
    };
    run(Aio::IoUring).or_else(|_| run(Aio::Threads))
}

/// A verb's ending: its exit code, or the error and what the program was about.
type Ending = std::result::Result<u8, Complaint>;

/// An error, and how qemu-img introduces it.
struct Complaint {
    /// What stands before the reason, like `Could not open 'NAME': `.
    before: String,
    /// The name of the image that the user gave.
    name: String,
    error: Error,
}

impl Complaint {
    fn opening(name: &str) -> impl Fn(Error) -> Complaint + '_ {
        move |error| Complaint {
            before: format!("Could not open '{name}': "),
            name: name.to_owned(),
            error,
        }
    }
}

/// Prints what went wrong, and returns the exit code.
fn finish(tool: Tool, verb: &str, ending: Result<Ending>) -> Result<u8> {
    match ending {
        Ok(Ok(code)) => Ok(code),
        Ok(Err(complaint)) if tool == Tool::QemuImg => {
            let Complaint { before, name, error } = complaint;
            errln!("qemu-img: {before}{}", text::reason(&name, &error));
            Ok(1)
        }
        Ok(Err(complaint)) => Err(complaint.error),
        Err(error) if tool == Tool::QemuImg => {
            match error.file_name() {
                Some(name) => errln!("qemu-img: Could not open '{name}': {}", error.why()),
                None => errln!("qemu-img: {}", error.why()),
            }
            if error.kind() == Kind::Invalid {
                errln!("Try 'qemu-img {verb} --help' for more info");
            }
            Ok(1)
        }
        Err(error) if error.kind() == Kind::Invalid => {
            errln!("{}: {}", tool.name(), error.why());
            Ok(1)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_split_at_single_commas() {
        let pair = |key: &str, value: Option<&str>| (key.to_owned(), value.map(str::to_owned));
        assert_eq!(
            split_options("a=1,b,c=x,,y=z,d="),
            [pair("a", Some("1")), pair("b", None), pair("c", Some("x,y=z")), pair("d", Some(""))]
        );
        assert_eq!(split_options(""), []);
    }

    #[test]
    fn image_options_are_taken_or_refused_by_name() {
        let parse = |text| parse_image_options(text, Access::Read);
        let target = parse("driver=qcow2,file.driver=file,file.filename=a,,b").unwrap();
        assert_eq!((target.name.as_str(), target.format), ("a,b", Some(ImageFormat::Qcow2)));
        for text in ["driver=qcow2", "driver=vmdk,filename=a", "filename=a,cache.direct=on"] {
            parse(text).unwrap_err();
        }
    }
}
