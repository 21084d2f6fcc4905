//! What can be chosen for an image, each choice defined once.
//!
//! [`ImageOptions`] is the only place that knows the options' names, values and help: the same
//! definition serves the flags of `serve`, the `key=value` after an image's name, and the keys of a
//! configuration file (see [`ImageOptions::from_pairs`]).
//!
//! Deliberately absent: what an option does; that is the engine's and the host's.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, Command, FromArgMatches};
use stillpoint_engine::{AllocPolicy, DetectZeroes, DiscardPolicy, ImageFormat, Options};
use stillpoint_host::{Aio, Cache};
use stillpoint_io::{Access, Error, GrowMeans, Kind, Result};

/// A value's name, the value, and what it means.
type Choice<T> = (&'static str, T, &'static str);

/// The formats of images.
pub const FORMATS: &[Choice<ImageFormat>] = &[
    ("raw", ImageFormat::Raw, "the guest's bytes as they are"),
    ("qcow2", ImageFormat::Qcow2, "qcow2, versions 2 and 3"),
];

/// The interfaces to the host's disk.
pub const AIOS: &[Choice<Aio>] = &[
    ("native", Aio::Native, "Linux AIO; needs cache none or directsync"),
    ("io_uring", Aio::IoUring, "one ring per queue"),
    ("threads", Aio::Threads, "blocking calls on a pool of threads"),
];

/// What stands between a write and the disk.
pub const CACHES: &[Choice<Cache>] = &[
    ("none", Cache::None, "past the page cache; durable when the guest flushes"),
    ("writeback", Cache::Writeback, "through the page cache; durable when the guest flushes"),
    ("writethrough", Cache::Writethrough, "through the page cache; every write is durable"),
    ("directsync", Cache::DirectSync, "past the page cache; every write is durable"),
    ("unsafe", Cache::Unsafe, "through the page cache, flushes ignored: a crash loses the image"),
];

const DISCARDS: &[Choice<DiscardPolicy>] = &[
    ("unmap", DiscardPolicy::Unmap, "give the host's space back"),
    ("ignore", DiscardPolicy::Ignore, "keep the space"),
];

const DETECT_ZEROES: &[Choice<DetectZeroes>] = &[
    ("off", DetectZeroes::Off, "write them like other bytes"),
    ("on", DetectZeroes::On, "note that the range is zero and keep its space"),
    ("unmap", DetectZeroes::Unmap, "note that the range is zero and give its space back"),
];

const ALLOCS: &[Choice<AllocPolicy>] = &[
    ("implicit", AllocPolicy::Implicit, "write nothing where the file is known to be zero"),
    ("zero-range", AllocPolicy::ZeroRange, "let the file system zero each cluster first"),
    ("write-zeroes", AllocPolicy::WriteZeroes, "write zeros around the data"),
];

/// Accepts the names of `choices`.
pub fn choose<T: Copy + Send + Sync + 'static>(
    choices: &'static [Choice<T>],
) -> impl TypedValueParser<Value = T> {
    let names = choices.iter().map(|(name, _, help)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(names).map(move |name| {
        let choice = choices.iter().find(|choice| choice.0 == name);
        choice.expect("only these names are accepted").1
    })
}

/// A number of bytes: `512`, `64K`, `1.5G`; the suffixes k, M, G, T, P, E count by 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let refusal = || format!("'{text}' is no size; write a number and one of k, M, G, T, P, E");
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let shift = match &text[digits.len()..] {
            "" | "b" | "B" => 0,
            "k" | "K" => 10,
            "m" | "M" => 20,
            "g" | "G" => 30,
            "t" | "T" => 40,
            "p" | "P" => 50,
            "e" | "E" => 60,
            _ => return Err(refusal()),
        };
        let too_large = || format!("{text} is too large");
        if let Ok(whole) = digits.parse::<u64>() {
            return whole.checked_mul(1 << shift).map(Size).ok_or_else(too_large);
        }
        let plain = digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        match digits.parse::<f64>() {
            Ok(number) if plain => {
                let bytes = number * (1u64 << shift) as f64;
                if bytes < u64::MAX as f64 { Ok(Size(bytes as u64)) } else { Err(too_large()) }
            }
            _ => Err(refusal()),
        }
    }
}

/// How a file grows: `truncate:64M` or `fallocate:16M`.
fn parse_growth(text: &str) -> Result<(GrowMeans, u64), String> {
    let refusal = || format!("'{text}' is neither truncate:SIZE nor fallocate:SIZE");
    let (means, step) = text.split_once(':').ok_or_else(refusal)?;
    let means = match means {
        "truncate" => GrowMeans::Truncate,
        "fallocate" => GrowMeans::Fallocate,
        _ => return Err(refusal()),
    };
    match step.parse::<Size>()? {
        Size(0) => Err("a growth step of no bytes".to_owned()),
        Size(step) => Ok((means, step)),
    }
}

/// `true`, `on`, `yes` and their opposites.
fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" | "true" | "yes" => Ok(true),
        "off" | "false" | "no" => Ok(false),
        _ => Err(format!("'{text}' is neither on nor off")),
    }
}

/// Choices that a server makes for an image; what is not chosen has a default.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Image options (also as ,KEY=VALUE after an IMAGE)")]
pub struct ImageOptions {
    /// The image's format; a file without a known header is refused for writing unless `raw` is said
    #[arg(short, long, value_name = "FORMAT", value_parser = choose(FORMATS), hide_possible_values = true)]
    pub format: Option<ImageFormat>,

    /// Serve without writing, beside other readers
    #[arg(long, value_name = "on|off", value_parser = parse_switch, num_args = 0..=1,
        require_equals = true, default_missing_value = "on")]
    pub read_only: Option<bool>,

    /// By which interface the image is read and written [default: io_uring]
    #[arg(long, value_parser = choose(AIOS))]
    pub aio: Option<Aio>,

    /// What stands between a write and the disk [default: none]
    #[arg(long, value_parser = choose(CACHES))]
    pub cache: Option<Cache>,

    /// Let names inside images open files in and below this folder, too, several times if need be; / allows
    /// every file [default: only in and below the folder of the image that names them]
    #[arg(long, value_name = "DIR")]
    pub backing_from: Vec<PathBuf>,

    /// What the guest's discards do [default: unmap]
    #[arg(long, value_parser = choose(DISCARDS))]
    pub discard: Option<DiscardPolicy>,

    /// What becomes of writes that hold only zeros [default: off]
    #[arg(long, value_parser = choose(DETECT_ZEROES))]
    pub detect_zeroes: Option<DetectZeroes>,

    #[command(flatten)]
    pub allocation: AllocationOptions,

    /// How much memory the L2 tables of the image may occupy [default: 32M]
    #[arg(long, value_name = "SIZE")]
    pub l2_cache_size: Option<Size>,

    /// How much memory the refcount blocks of the image may occupy [default: 4M]
    #[arg(long, value_name = "SIZE")]
    pub refcount_cache_size: Option<Size>,
}

/// Choices about new clusters: `serve` and `bench` have them.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct AllocationOptions {
    /// How the rest of a new cluster becomes zeros [default: implicit]
    #[arg(long, value_parser = choose(ALLOCS))]
    pub alloc: Option<AllocPolicy>,

    /// How the image's file grows: truncate:SIZE or fallocate:SIZE [default: measured for the file system]
    #[arg(long, value_name = "MEANS:STEP", value_parser = parse_growth)]
    pub grow: Option<(GrowMeans, u64)>,
}

impl AllocationOptions {
    /// Puts the choices into `options`.
    pub fn apply(&self, options: &mut Options) {
        options.alloc = self.alloc.unwrap_or(options.alloc);
        options.grow = self.grow.or(options.grow);
    }
}

impl ImageOptions {
    /// Reads the options from pairs of key and value, as they stand behind an image's name or in a
    /// configuration file. `image` is named in errors.
    pub fn from_pairs(image: &str, pairs: &[(String, Option<String>)]) -> Result<ImageOptions> {
        let command = || {
            let command = Command::new("image").no_binary_name(true).disable_help_flag(true);
            ImageOptions::augment_args(command).args_override_self(true)
        };
        let refuse =
            |why: String| Error::new(Kind::Invalid, "understand its options", why).file(image);
        let mut args = Vec::new();
        for (key, value) in pairs {
            let known = command();
            let mut keys = known.get_arguments().filter_map(|arg| arg.get_long());
            if !keys.any(|known| known == key) {
                let keys: Vec<_> = known.get_arguments().filter_map(|arg| arg.get_long()).collect();
                let remedy = format!("the keys are {}", keys.join(", "));
                return Err(refuse(format!("there is no key '{key}'")).remedy(remedy));
            }
            args.push(match value {
                Some(value) => format!("--{key}={value}"),
                None => format!("--{key}"),
            });
        }
        let matches =
            command().try_get_matches_from(args).map_err(|error| refuse(reason(&error)))?;
        ImageOptions::from_arg_matches(&matches).map_err(|error| refuse(reason(&error)))
    }

    /// These choices, and those of `base` where there are none.
    pub fn or(self, base: &ImageOptions) -> ImageOptions {
        ImageOptions {
            format: self.format.or(base.format),
            read_only: self.read_only.or(base.read_only),
            aio: self.aio.or(base.aio),
            cache: self.cache.or(base.cache),
            backing_from: match self.backing_from.is_empty() {
                true => base.backing_from.clone(),
                false => self.backing_from,
            },
            discard: self.discard.or(base.discard),
            detect_zeroes: self.detect_zeroes.or(base.detect_zeroes),
            allocation: AllocationOptions {
                alloc: self.allocation.alloc.or(base.allocation.alloc),
                grow: self.allocation.grow.or(base.allocation.grow),
            },
            l2_cache_size: self.l2_cache_size.or(base.l2_cache_size),
            refcount_cache_size: self.refcount_cache_size.or(base.refcount_cache_size),
        }
    }

    /// The engine's part of the choices, with the defaults filled in.
    pub fn engine(&self) -> Options {
        let read_only = self.read_only.unwrap_or(false);
        let default = Options::default();
        let mut options = Options {
            format: self.format,
            access: if read_only { Access::Read } else { Access::Write },
            discard: self.discard.unwrap_or(default.discard),
            detect_zeroes: self.detect_zeroes.unwrap_or(default.detect_zeroes),
            l2_cache_size: self.l2_cache_size.map_or(default.l2_cache_size, |Size(bytes)| bytes),
            refcount_cache_size: self
                .refcount_cache_size
                .map_or(default.refcount_cache_size, |Size(bytes)| bytes),
            ..default
        };
        self.allocation.apply(&mut options);
        options
    }

    /// The interface to the host's disk.
    pub fn aio(&self) -> Aio {
        self.aio.unwrap_or(Aio::IoUring)
    }

    /// What stands between a write and the disk.
    pub fn cache(&self) -> Cache {
        self.cache.unwrap_or(Cache::None)
    }
}

/// The gist of clap's message: its first line, without the word "error".
fn reason(error: &clap::Error) -> String {
    let text = match error.kind() {
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => error.render().to_string(),
        _ => error.to_string(),
    };
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    match lines.next() {
        Some(values) if values.starts_with("[possible values") => format!("{first} {values}"),
        _ => first,
    }
}

/// `count` bytes for people: `4 KiB`, `1.5 GiB`.
pub fn human(count: impl Into<u64> + Display) -> String {
    let count: u64 = count.into();
    let mut value = count as f64;
    for unit in ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"] {
        if value < 1024.0 {
            let digits = if unit == "bytes" || value.fract() < 0.05 { 0 } else { 1 };
            return format!("{value:.digits$} {unit}");
        }
        value /= 1024.0;
    }
    format!("{value:.1} EiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_count_by_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("4k", 4096),
            ("1.5G", 3 << 29),
            ("32M", 32 << 20),
            ("7E", 7 << 60),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "k", "-1", "1X", "1e3", "16E", "99999999999999999999", "nan", "1 M"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_for_people_are_short() {
        for (bytes, text) in
            [(0, "0 bytes"), (4096, "4 KiB"), (3u64 << 29, "1.5 GiB"), (1 << 40, "1 TiB")]
        {
            assert_eq!(human(bytes), text);
        }
    }

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, Option<String>)> {
        let value = |value: &str| (!value.is_empty()).then(|| value.to_owned());
        list.iter().map(|(key, text)| ((*key).to_owned(), value(text))).collect()
    }

    #[test]
    fn keys_mean_what_the_flags_mean() {
        let options = ImageOptions::from_pairs(
            "disk",
            &pairs(&[
                ("format", "raw"),
                ("read-only", ""),
                ("cache", "directsync"),
                ("grow", "fallocate:16M"),
                ("l2-cache-size", "1M"),
                ("cache", "writeback"),
                ("backing-from", "/a"),
                ("backing-from", "/b"),
            ]),
        )
        .unwrap();
        assert_eq!((options.read_only, options.cache()), (Some(true), Cache::Writeback));
        let engine = options.engine();
        assert_eq!((engine.format, engine.access), (Some(ImageFormat::Raw), Access::Read));
        assert_eq!(engine.grow, Some((GrowMeans::Fallocate, 16 << 20)));
        assert_eq!(engine.l2_cache_size, 1 << 20);
        assert_eq!(options.backing_from, ["/a", "/b"].map(PathBuf::from));
    }

    #[test]
    fn an_images_own_choice_goes_first() {
        let own = ImageOptions::from_pairs("disk", &pairs(&[("read-only", "off")])).unwrap();
        let all =
            ImageOptions::from_pairs("disk", &pairs(&[("read-only", ""), ("aio", "threads")]));
        let both = own.or(&all.unwrap());
        assert_eq!((both.read_only, both.aio()), (Some(false), Aio::Threads));

        let folder =
            |dir| ImageOptions::from_pairs("disk", &pairs(&[("backing-from", dir)])).unwrap();
        let both = folder("/a").or(&folder("/b"));
        assert_eq!(both.backing_from, [PathBuf::from("/a")]);
        let both = ImageOptions::default().or(&folder("/b"));
        assert_eq!(both.backing_from, [PathBuf::from("/b")]);
    }

    #[test]
    fn mistakes_are_named() {
        for (key, value, words) in [
            ("colour", "red", "no key 'colour'"),
            ("cache", "warm", "'warm'"),
            ("grow", "fallocate", "neither truncate:SIZE nor fallocate:SIZE"),
            ("read-only", "maybe", "neither on nor off"),
            ("l2-cache-size", "big", "no size"),
        ] {
            let error = ImageOptions::from_pairs("disk", &pairs(&[(key, value)])).unwrap_err();
            assert!(error.to_string().starts_with("disk: "), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
