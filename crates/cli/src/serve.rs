//! `stillpoint serve`: from what was typed, or stands in a configuration file, to a server's plan.

use std::path::{Path, PathBuf};

use clap::Args;
use stillpoint_host::Reach;
use stillpoint_host::net::Address;
use stillpoint_io::{Error, Kind, Result};
use stillpoint_serve::server::{self, Image, Plan};
use stillpoint_serve::stop::Stop;

use crate::options::{ImageOptions, Size};

const EXAMPLES: &str = "\
Examples:
  Serve a qcow2 image on a unix socket, as the export \"disk\" and as the only one:
    stillpoint serve disk.qcow2 --nbd unix:/run/disk.sock

  Attach it to a virtual machine:
    qemu-system-x86_64 ... -drive driver=nbd,server.type=unix,server.path=/run/disk.sock

  Two images under names of their own, one of them read-only, for other machines:
    stillpoint serve --nbd tcp:0.0.0.0:10809 root=/vm/a.qcow2 media=/iso/d.iso,format=raw,read-only

  The same in a file, FILE.toml, started by --config FILE.toml:
    nbd = [\"tcp:0.0.0.0:10809\"]
    [[image]]
    name = \"root\"
    path = \"/vm/a.qcow2\"
    [[image]]
    name = \"media\"
    path = \"/iso/d.iso\"
    format = \"raw\"
    read-only = true

  An overlay whose backing file lies in another folder than its own:
    stillpoint serve /vm/overlay.qcow2 --backing-from /templates

A comma inside a file's name is written twice.

SIGTERM, SIGINT and SIGHUP end the server in order: requests in flight are answered, everything is made
durable, images are closed clean, sockets are removed.";

/// Serve images to NBD clients
#[derive(Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES, args_override_self = true)]
pub struct ServeArgs {
    /// An image to serve: [NAME=]FILE[,KEY=VALUE]...; its name is the file's without the ending, and a
    /// single image is also the nameless export
    #[arg(value_name = "IMAGE")]
    images: Vec<String>,

    /// Listen for NBD clients: unix:PATH or tcp:HOST:PORT, several times if need be
    /// [default: tcp:localhost:10809]
    #[arg(long, value_name = "ADDRESS")]
    nbd: Vec<Address>,

    /// How many threads serve clients; each client stays on one
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: u16,

    /// How many clients may be connected at once
    #[arg(long, value_name = "COUNT", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    max_clients: u32,

    /// How many requests one client may have in flight
    #[arg(long, value_name = "COUNT", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    max_requests: u32,

    /// How much memory all requests in flight may occupy, at least 64M; beyond it clients wait
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_memory)]
    memory: Size,

    /// Write the process's id to this file
    #[arg(long, value_name = "FILE")]
    pid_file: Option<PathBuf>,

    /// Read options and images from a TOML file; what stands on the command line goes first
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(flatten)]
    image_options: ImageOptions,
}

/// One image as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSpec {
    /// The export's name, if it was given one.
    pub name: Option<String>,
    /// The image's file.
    pub path: String,
    /// Its own options.
    pub pairs: Vec<(String, Option<String>)>,
}

impl ServeArgs {
    /// The configuration file that was named.
    pub fn config(&self) -> Option<&Path> {
        self.config.as_deref()
    }
}

/// Runs the server until it is told to stop; `configured` are the images of the configuration file.
pub fn run(args: ServeArgs, configured: Vec<ImageSpec>) -> Result<u8> {
    let plan = plan(args, configured)?;
    server::run(plan, Stop::new(), |addresses| {
        for address in addresses {
            tracing::info!("ready: NBD clients can connect to {address}");
        }
    })?;
    Ok(0)
}

/// The least memory for requests, in bytes.
const MEMORY_MIN: u64 = 64 << 20;

fn plan(args: ServeArgs, mut specs: Vec<ImageSpec>) -> Result<Plan> {
    for image in &args.images {
        specs.push(parse_image(image)?);
    }
    if specs.is_empty() {
        let error = Error::new(Kind::Invalid, "serve", "no image is named");
        return Err(error.remedy("name one: stillpoint serve FILE"));
    }
    let images = specs.into_iter().map(|spec| image(spec, &args.image_options));
    let mut plan = Plan {
        images: images.collect::<Result<_>>()?,
        listen: args.nbd,
        queue_count: args.queues.into(),
        client_count_max: args.max_clients as usize,
        memory_bytes: args.memory.0,
        pid_file: args.pid_file,
        catch_signals: true,
        ..Plan::default()
    };
    plan.allowance.in_flight_max = args.max_requests as usize;
    if plan.listen.is_empty() && std::env::var_os("LISTEN_FDS").is_none() {
        plan.listen.push("tcp:localhost:10809".parse().expect("it is an address"));
    }
    refuse_duplicates(&plan.images)?;
    Ok(plan)
}

/// Duplicate names are refused before any image is opened.
fn refuse_duplicates(images: &[Image]) -> Result<()> {
    for (index, image) in images.iter().enumerate() {
        if let Some(other) = images[..index].iter().find(|other| other.name == image.name) {
            let why = format!("{} is served as \"{}\" already", other.path, other.name);
            let error = Error::new(Kind::Invalid, "serve it under the same name", why);
            return Err(error.file(&image.path).remedy("give it a name: NAME=FILE"));
        }
    }
    Ok(())
}

fn image(spec: ImageSpec, defaults: &ImageOptions) -> Result<Image> {
    let options = ImageOptions::from_pairs(&spec.path, &spec.pairs)?.or(defaults);
    let stem = || {
        let stem = Path::new(&spec.path).file_stem();
        stem.map_or_else(|| spec.path.clone(), |stem| stem.to_string_lossy().into_owned())
    };
    Ok(Image {
        name: spec.name.unwrap_or_else(stem),
        path: spec.path.clone(),
        aio: options.aio(),
        cache: options.cache(),
        reach: Reach::folders(&options.backing_from)?,
        options: options.engine(),
    })
}

/// Takes `[NAME=]FILE[,KEY=VALUE]...` apart. A comma is written twice inside a name; what contains a
/// slash before its first `=` has no NAME.
fn parse_memory(text: &str) -> std::result::Result<Size, String> {
    match text.parse()? {
        Size(bytes) if bytes < MEMORY_MIN => {
            Err("less than 64M, which one request may need".into())
        }
        size => Ok(size),
    }
}

fn parse_image(text: &str) -> Result<ImageSpec> {
    const COMMA: &str = "\u{0}";
    let marked = text.replace(",,", COMMA);
    let mut parts = marked.split(',').map(|part| part.replace(COMMA, ","));
    let first = parts.next().unwrap_or_default();
    let (name, path) = match first.split_once('=') {
        Some((name, path)) if !name.contains('/') => (Some(name.to_owned()), path.to_owned()),
        _ => (None, first),
    };
    if path.is_empty() {
        let error = Error::new(Kind::Invalid, "serve", format!("'{text}' names no file"));
        return Err(error.remedy("write [NAME=]FILE[,KEY=VALUE]..."));
    }
    let pairs = parts.map(|part| match part.split_once('=') {
        Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
        None => (part, None),
    });
    Ok(ImageSpec { name, path, pairs: pairs.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: Option<&str>, path: &str, pairs: &[(&str, Option<&str>)]) -> ImageSpec {
        let own = |text: &str| text.to_owned();
        let pairs = pairs.iter().map(|(key, value)| (own(key), value.map(own))).collect();
        ImageSpec { name: name.map(own), path: path.to_owned(), pairs }
    }

    #[test]
    fn images_are_taken_apart() {
        for (text, expected) in [
            ("disk.qcow2", spec(None, "disk.qcow2", &[])),
            ("root=/vm/a", spec(Some("root"), "/vm/a", &[])),
            ("=a", spec(Some(""), "a", &[])),
            ("./a=b.img", spec(None, "./a=b.img", &[])),
            ("a,,b,read-only", spec(None, "a,b", &[("read-only", None)])),
            ("x=a,cache=none", spec(Some("x"), "a", &[("cache", Some("none"))])),
            // A name is a plain path, whatever it looks like.
            ("json:{}", spec(None, "json:{}", &[])),
        ] {
            assert_eq!(parse_image(text).unwrap(), expected, "{text}");
        }
        for text in ["", "x=", ",read-only"] {
            assert!(parse_image(text).is_err(), "{text}");
        }
    }

    #[test]
    fn names_come_from_files_and_are_never_double() {
        let image = |text: &str| image(parse_image(text).unwrap(), &ImageOptions::default());
        assert_eq!(image("/vm/disk.qcow2").unwrap().name, "disk");
        assert_eq!(image("/vm/disk").unwrap().name, "disk");
        let images = [image("/vm/disk.qcow2").unwrap(), image("/other/disk.raw").unwrap()];
        let error = refuse_duplicates(&images).unwrap_err().to_string();
        assert!(error.contains("/other/disk.raw") && error.contains("NAME=FILE"), "{error}");
    }
}
