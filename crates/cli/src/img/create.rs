//! `create`: makes an image.

use clap::Args;
use stillpoint_engine::offline::CompressionType;
use stillpoint_engine::offline::create::{Preallocation, Qcow2Options, create_qcow2, create_raw};
use stillpoint_engine::offline::image::{Image, format_by_name};
use stillpoint_host::{Cache, HostFiles};
use stillpoint_io::{Access, Error, Kind, Queue, Result};

use super::create_options::{CreateOptions, OptionValue};
use super::text::{parse_size, system_words};
use super::{finish, invalid, run_on_loop};
use crate::Tool;

/// Make an image
#[derive(Args)]
pub struct CreateArgs {
    /// The new image's format
    #[arg(short, long, value_name = "FMT", default_value = "raw")]
    format: String,

    /// Options of the format, `key=value,...`; `-o help` lists them
    #[arg(short, long = "options", value_name = "OPTIONS")]
    options: Vec<String>,

    /// Stack the new image on another
    #[arg(short, long, value_name = "FILE")]
    backing: Option<String>,

    /// The other image's format
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,

    /// Do not look at the other image
    #[arg(short = 'u', long)]
    backing_unsafe: bool,

    /// Print errors only
    #[arg(short, long)]
    quiet: bool,

    /// The image's file; an existing one is replaced
    #[arg(value_name = "FILE")]
    name: Option<String>,

    /// The disk's size; that of the backing image unless it is given
    #[arg(value_name = "SIZE")]
    size: Option<String>,
}

/// A refusal, complete but for the program's name.
type Refusal = String;

pub fn run(args: &CreateArgs, tool: Tool) -> Result<u8> {
    if args.options.iter().any(|list| CreateOptions::asks_for_help(list)) {
        return match CreateOptions::of_format(&args.format) {
            Some(options) => {
                out!("{}", options.help());
                Ok(0)
            }
            None => refuse(tool, format!("Unknown file format '{}'", args.format)),
        };
    }
    if let Some(empty) = args.options.iter().find(|list| list.is_empty() || list.starts_with(',')) {
        return refuse(tool, format!("Invalid option list: {empty}"));
    }
    let Some(name) = &args.name else {
        return finish(tool, "create", Err(invalid("Expecting image file name")));
    };
    let size = match args.size.as_deref().map(parse_size_argument).transpose() {
        Ok(size) => size,
        Err(refusal) => return refuse(tool, refusal),
    };
    let made = run_on_loop(Cache::Writeback, async |queue, files| {
        make(&queue, files, args, name, size).await
    })?;
    match made {
        Ok(()) => Ok(0),
        Err(refusal) => refuse(tool, format!("{name}: {refusal}")),
    }
}

fn refuse(tool: Tool, why: Refusal) -> Result<u8> {
    errln!("{}: {why}", tool.name());
    Ok(1)
}

fn parse_size_argument(text: &str) -> Result<u64, Refusal> {
    match parse_size(text) {
        Some(bytes) if bytes < 1 << 63 => Ok(bytes),
        Some(_) => {
            Err(format!("Invalid image size specified. Must be between 0 and {}.", i64::MAX))
        }
        None if text.trim_end_matches(char::is_alphabetic).parse::<u64>().is_ok()
            && text.ends_with(['k', 'K', 'M', 'G', 'T', 'P', 'E']) =>
        {
            Err(format!("Invalid image size specified. Must be between 0 and {}.", i64::MAX))
        }
        None => Err(format!("Invalid image size specified: '{text}'.")),
    }
}

async fn make(
    queue: &Queue,
    files: HostFiles,
    args: &CreateArgs,
    name: &str,
    size: Option<u64>,
) -> Result<(), Refusal> {
    let Some(mut options) = CreateOptions::of_format(&args.format) else {
        return Err(format!("Unknown file format '{}'", args.format));
    };
    for list in &args.options {
        options.take_list(list)?;
    }
    if let Some(size) = size {
        if options.number("size").is_some() {
            return Err("The image size must be specified only once".to_owned());
        }
        options.set("size", OptionValue::Number(size));
    }
    take_backing(queue, &files, args, name, &mut options).await?;
    if options.number("size").is_none() {
        return Err("Image creation needs a size parameter".to_owned());
    }
    for (option, default) in [
        ("cluster_size", OptionValue::Number(65536)),
        ("extended_l2", OptionValue::Switch(false)),
        ("compression_type", OptionValue::Text("zlib".to_owned())),
        ("lazy_refcounts", OptionValue::Switch(false)),
        ("refcount_bits", OptionValue::Number(16)),
    ] {
        options.set_default(option, default);
    }
    if !args.quiet {
        outln!("Formatting '{name}', fmt={}{}", args.format, options.describe());
    }
    let result = if args.format == "raw" {
        let preallocation = preallocation(&options)?;
        if preallocation == Preallocation::Metadata {
            return Err("Unsupported preallocation mode: metadata".to_owned());
        }
        let size = options.number("size").expect("it was looked for above");
        create_raw(queue, &files, name, size, preallocation).await
    } else {
        create_qcow2(queue, &files, name, &qcow2_options(&options)?).await
    };
    result.map_err(|error| reason(name, &error))
}

/// Looks at the backing image, for its format and its size.
async fn take_backing(
    queue: &Queue,
    files: &HostFiles,
    args: &CreateArgs,
    name: &str,
    options: &mut CreateOptions,
) -> Result<(), Refusal> {
    if let Some(backing) = &args.backing {
        if !options.has("backing_file") {
            return Err(format!("Backing file not supported for file format '{}'", args.format));
        }
        options.set("backing_file", OptionValue::Text(backing.clone()));
    }
    if let Some(format) = &args.backing_format {
        if !options.has("backing_fmt") {
            return Err(format!("Backing format not supported for file format '{}'", args.format));
        }
        options.set("backing_fmt", OptionValue::Text(format.clone()));
    }
    let Some(backing) = options.text("backing_file").map(str::to_owned) else { return Ok(()) };
    if backing.is_empty() {
        return Err("Expected backing file name, got empty string".to_owned());
    }
    if backing == name {
        return Err("Error: Trying to create an image with the same filename as the backing file"
            .to_owned());
    }
    let format = options.text("backing_fmt").map(format_by_name).transpose();
    let hint = "Could not open backing image.";
    let format = format.map_err(|error| format!("{}\n{hint}", error.why()))?;
    if args.backing_unsafe {
        return match format {
            Some(_) => Ok(()),
            None => Err("Backing file specified without backing format".to_owned()),
        };
    }
    let image = Image::open(queue, files, &backing, Some(name), format, Access::Read).await;
    let image = image.map_err(|error| {
        let file = error.file_name().unwrap_or(&backing);
        let why = match error.errno() {
            Some(errno) => format!("Could not open '{file}': {}", system_words(errno)),
            None => error.why().to_owned(),
        };
        format!("{why}\n{hint}")
    })?;
    if format.is_none() {
        // F2: a format that was guessed must not be written down as if it were known.
        let format = if image.header.is_some() { "qcow2" } else { "raw" };
        return Err(format!(
            "Backing file specified without backing format\nDetected format of {format}."
        ));
    }
    options.set_default("size", OptionValue::Number(image.virtual_size()));
    Ok(())
}

fn preallocation(options: &CreateOptions) -> Result<Preallocation, Refusal> {
    match options.text("preallocation") {
        None | Some("off") => Ok(Preallocation::Off),
        Some("metadata") => Ok(Preallocation::Metadata),
        Some("falloc") => Ok(Preallocation::Falloc),
        Some("full") => Ok(Preallocation::Full),
        Some(other) => Err(format!("Parameter 'preallocation' does not accept value '{other}'")),
    }
}

fn qcow2_options(options: &CreateOptions) -> Result<Qcow2Options, Refusal> {
    let owned = |name| options.text(name).map(str::to_owned);
    let number = |name| options.number(name).expect("it has a default");
    Ok(Qcow2Options {
        size: number("size"),
        version: match options.text("compat") {
            None | Some("1.1" | "v3") => 3,
            Some("0.10" | "v2") => 2,
            Some(other) => {
                return Err(format!("Parameter 'version' does not accept value '{other}'"));
            }
        },
        cluster_size: number("cluster_size"),
        extended_l2: options.switch("extended_l2"),
        refcount_bits: number("refcount_bits"),
        lazy_refcounts: options.switch("lazy_refcounts"),
        compression: match options.text("compression_type") {
            None | Some("zlib") => CompressionType::Zlib,
            Some("zstd") => CompressionType::Zstd,
            Some(other) => {
                let why = format!("Parameter 'compression-type' does not accept value '{other}'");
                return Err(why);
            }
        },
        backing_name: owned("backing_file"),
        backing_format: owned("backing_fmt"),
        data_file: owned("data_file"),
        data_file_raw: options.switch("data_file_raw"),
        preallocation: preallocation(options)?,
    })
}

/// Why an image was not made.
fn reason(name: &str, error: &Error) -> Refusal {
    let file = error.file_name().unwrap_or(name);
    match (error.kind(), error.errno()) {
        (Kind::Busy, _) => {
            format!("Failed to get \"write\" lock\nIs another process using the image [{file}]?")
        }
        (Kind::NoSpace, Some(errno)) => {
            format!("Could not resize image: {}", system_words(errno))
        }
        (_, Some(errno)) => format!("Could not create '{file}': {}", system_words(errno)),
        (_, None) => error.why().to_owned(),
    }
}
