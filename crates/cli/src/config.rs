//! Configuration files: the flags of `serve` as TOML.
//!
//! A file adds no option of its own. A key is a flag's long name, and is understood by the flag's
//! own definition; `[[image]]` tables hold `name`, `path` and the keys of an image.

use std::path::Path;

use clap::Parser;
use stillpoint_io::{Error, Kind, Result};
use toml::{Table, Value};

use crate::serve::{ImageSpec, ServeArgs};

/// What a file says.
#[derive(Debug)]
pub struct Config {
    /// Its options as flags.
    pub flags: Vec<String>,
    /// Its images.
    pub images: Vec<ImageSpec>,
}

/// Checks a file's flags by themselves, so that a mistake is known to be the file's.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct FileFlags {
    #[command(flatten)]
    _args: ServeArgs,
}

/// Reads the file at `path`.
pub fn read(path: &Path) -> Result<Config> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::from_std("read the configuration", &error).file(path.display()))?;
    parse(&text).map_err(|why| {
        Error::new(Kind::Invalid, "understand the configuration", why).file(path.display())
    })
}

fn parse(text: &str) -> Result<Config, String> {
    let mut table: Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let images = match table.remove("image") {
        None => Vec::new(),
        Some(Value::Array(images)) => {
            images.into_iter().map(image).collect::<Result<Vec<_>, _>>()?
        }
        Some(_) => return Err("images are written as [[image]]".to_owned()),
    };
    let mut flags = Vec::new();
    for (key, value) in table {
        for value in values(value) {
            flags.push(format!("--{key}={}", scalar(&key, value)?));
        }
    }
    FileFlags::try_parse_from(&flags).map_err(|error| {
        let text = error.to_string();
        text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
    })?;
    Ok(Config { flags, images })
}

fn image(value: Value) -> Result<ImageSpec, String> {
    let Value::Table(mut table) = value else {
        return Err("images are written as [[image]]".to_owned());
    };
    let mut take = |key| table.remove(key).map(|value| scalar(key, value)).transpose();
    let name = take("name")?;
    let path = take("path")?.ok_or("an image has no path")?;
    let mut pairs = Vec::new();
    for (key, value) in table {
        for value in values(value) {
            pairs.push((key.clone(), Some(scalar(&key, value)?)));
        }
    }
    Ok(ImageSpec { name, path, pairs })
}

/// What stands for one flag each: a list's members, or the one value.
fn values(value: Value) -> Vec<Value> {
    match value {
        Value::Array(values) => values,
        value => vec![value],
    }
}

fn scalar(key: &str, value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Boolean(true) => Ok("on".to_owned()),
        Value::Boolean(false) => Ok("off".to_owned()),
        _ => Err(format!("'{key}' is neither a text, a whole number, true nor false")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_the_flags_and_images_keep_their_own() {
        let config = parse(
            "nbd = ['unix:/a', 'tcp:b:1']\nqueues = 2\ncache = 'none'\n\
             [[image]]\npath = '/vm/a'\nread-only = true\n\
             [[image]]\nname = 'b'\npath = '/vm/b'\nbacking-from = ['/x', '/y']\n",
        )
        .unwrap();
        let mut flags = config.flags;
        flags.sort();
        assert_eq!(flags, ["--cache=none", "--nbd=tcp:b:1", "--nbd=unix:/a", "--queues=2"]);
        assert_eq!(config.images.len(), 2);
        assert_eq!(config.images[0].pairs, [("read-only".to_owned(), Some("on".to_owned()))]);
        assert_eq!(config.images[1].name.as_deref(), Some("b"));
        let folder = |path: &str| ("backing-from".to_owned(), Some(path.to_owned()));
        assert_eq!(config.images[1].pairs, [folder("/x"), folder("/y")]);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, words) in [
            ("colour = 'red'", "--colour"),
            ("queues = 'many'", "many"),
            ("queues = 1.5", "'queues' is neither"),
            ("image = 'disk'", "[[image]]"),
            ("[[image]]\nname = 'x'", "no path"),
            ("nbd = ", "TOML"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
